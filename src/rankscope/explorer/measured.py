"""One setting, measured: the network turned, its text as tokens, and one pass in deviation arithmetic."""

from collections.abc import Callable
from dataclasses import dataclass

import polars as pl
from torch import Tensor

from rankscope.errors import SettingError
from rankscope.explorer.remedies import chosen
from rankscope.explorer.settings import Setting
from rankscope.metrics import chosen_metrics
from rankscope.nets import Transformer
from rankscope.profiles import Profile, one_pass
from rankscope.profiles.readers import MetricReader, ShapeReader
from rankscope.profiles.rows import table
from rankscope.profiles.shapes import Shape
from rankscope.runs import Manifest, Network

METRICS = ("relative_residual", "relative_mu")


@dataclass(frozen=True, eq=False)
class Measured:
    """What the curve and the cloud are drawn from."""

    setting: Setting
    net: Transformer
    """As turned."""
    X: Tensor
    words: list[str]
    rows: pl.DataFrame
    """As `Profile.table` has them, of a variant without a name."""
    arithmetic: str
    shapes: list[Shape]

    def profile(self, name: str) -> Profile:
        """The measurement under a name."""
        about = Network(variant=name, arithmetic=self.arithmetic, metrics=tuple(METRICS))
        return Profile(self.rows.with_columns(pl.lit(name).alias("variant")), Manifest(networks=(about,)))

    def curve(self, name: str = "relative_residual", column: str = "log10") -> list[float]:
        """A metric by layer."""
        return self.rows.filter(metric=name).sort("layer")[column].to_list()

    @property
    def starts_like(self) -> tuple[object, ...]:
        """The same for settings that begin with the same tokens."""
        s = self.setting
        return (s.model, s.shape if s.model == "random" else None, s.text, s.tokens)


def turned(net: Transformer, setting: Setting) -> Transformer:
    """The network with its parts as the setting has them; weights are shared. Remedies are on it already
    (`shelf.py`)."""
    for each in chosen(setting):
        if getattr(each, "sets_skip", False) and setting.skip is not None:
            raise SettingError(
                f"{each.name} sets the weight of the skip, and so does skip {setting.skip:g}: leave the skip "
                "weight as the model has it, or take the remedy out"
            )
    if setting.layers is not None:
        net = net.variant(layers=setting.layers)
    mask = setting.mask
    if setting.window is not None:
        parts = str(net.arch.mask if mask is None else mask).split(";")
        mask = ";".join(f"{part}&window:{setting.window}" for part in parts)
    divisor = (net.arch.divisor if setting.divisor is None else setting.divisor) * setting.temperature
    return net.variant(
        skip=setting.skip,
        mlp=setting.mlp,
        norm=setting.norm,
        mask=mask,
        divisor=None if divisor == net.arch.divisor else divisor,
    )


def measured(base: Transformer, setting: Setting, check: Callable[[], None]) -> Measured:
    """Measure a setting of a network. `check` is called between layers, and may raise."""
    if not setting.text.strip():
        raise SettingError("there is no text to measure yet: write a few words")
    net = turned(base, setting)
    X, _ = net.encode([setting.text], setting.tokens)
    check()
    (words,) = net.words([setting.text], setting.tokens)
    chosen, shape = MetricReader(chosen_metrics("the explorer", METRICS)), ShapeReader()
    ran = one_pass(net, X, readers=[chosen, shape], progress=lambda *_: check(), estimate=True)
    rows = table(chosen.result(), "", ran.arithmetic)
    return Measured(setting, net, X, words, rows, ran.arithmetic, shape.result())

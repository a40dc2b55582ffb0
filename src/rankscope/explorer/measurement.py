"""One measurement for the page: the network as its controls have it, its text as tokens, and one pass over it
in deviation arithmetic."""

from collections.abc import Callable
from dataclasses import dataclass

import polars as pl
from torch import Tensor

from rankscope.errors import SettingError
from rankscope.explorer.controls import RANDOM, Controls
from rankscope.explorer.network_cache import chosen_remedies
from rankscope.metrics import chosen_metrics
from rankscope.nets import Transformer
from rankscope.profiles import MetricReader, Profile, ResidualShape, ShapeReader, one_pass, readings_table
from rankscope.runs import Manifest, Network

METRICS = ("relative_residual", "relative_mu")


@dataclass(frozen=True, eq=False)
class PageMeasurement:
    """What the curve and the cloud of the page are drawn from."""

    controls: Controls
    net: Transformer  # The network with all controls applied
    X: Tensor
    words: list[str]  # The tokens as text
    rows: pl.DataFrame  # As `Profile.table` has them, of a variant without a name
    arithmetic: str
    shapes: list[ResidualShape]

    def profile(self, name: str) -> Profile:
        """The readings as a profile whose variant has this name."""
        network = Network(variant=name, arithmetic=self.arithmetic, metrics=tuple(METRICS))
        return Profile(self.rows.with_columns(pl.lit(name).alias("variant")), Manifest(networks=(network,)))

    def curve(self, name: str = "relative_residual", column: str = "log10") -> list[float]:
        """The values of a metric, layer by layer."""
        return self.rows.filter(metric=name).sort("layer")[column].to_list()

    @property
    def input_key(self) -> tuple[object, ...]:
        """A key that is equal for measurements that begin with the same tokens."""
        shape = self.controls.shape if self.controls.model == RANDOM else None
        return (self.controls.model, shape, self.controls.text, self.controls.tokens)


def network_with(net: Transformer, controls: Controls) -> Transformer:
    """The network with its parts as the controls have them, on the same weights.

    Remedies are on it already (`NetworkCache.network`).
    """
    for remedy in chosen_remedies(controls):
        if getattr(remedy, "sets_skip", False) and controls.skip is not None:
            both = f"{remedy.name} sets the weight of the skip, and so does skip {controls.skip:g}"
            raise SettingError(f"{both}: take one of them out", subject="skip")
    if controls.layers is not None:
        net = net.variant(layers=controls.layers)
    mask = controls.mask
    if controls.window is not None:
        masks = str(net.arch.mask if mask is None else mask).split(";")
        mask = ";".join(f"{layer_mask}&window:{controls.window}" for layer_mask in masks)
    scaled = (net.arch.divisor if controls.divisor is None else controls.divisor) * controls.temperature
    divisor = None if scaled == net.arch.divisor else scaled
    return net.variant(skip=controls.skip, mlp=controls.mlp, norm=controls.norm, mask=mask, divisor=divisor)


def measure_page(base: Transformer, controls: Controls, check: Callable[[], None]) -> PageMeasurement:
    """Measure a network under these controls; `check` is called between layers and may raise."""
    if not controls.text.strip():
        raise SettingError("there is no text to measure yet: write a few words", subject="text")
    net = network_with(base, controls)
    X, _ = net.encode([controls.text], controls.tokens)
    check()
    (words,) = net.words([controls.text], controls.tokens)
    metrics, shapes = MetricReader(chosen_metrics("the explorer", METRICS)), ShapeReader()
    result = one_pass(net, X, readers=[metrics, shapes], progress=lambda *_: check(), check=True)
    rows = readings_table(metrics.result(), "", result.arithmetic)
    return PageMeasurement(controls, net, X, words, rows, result.arithmetic, shapes.result())

"""The answer to a page: one measurement under its controls, in deviation arithmetic (`measure_page`), and of it the
curve, the cloud, paths and bounds, each as soon as it is computed.

Figures show the page's controls and those of its pins. Results are kept for a while, so that a pin costs
nothing; they hold their network, so they are dropped when `NetworkCache` drops it.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import polars as pl
import torch
from torch import Tensor

from rankscope.errors import RankscopeError, SettingError, require
from rankscope.explorer.controls import RANDOM, Controls, PageRequest, in_page_words
from rankscope.explorer.jobs import InterruptMode
from rankscope.explorer.network_cache import NetworkCache, chosen_remedies, sizes
from rankscope.figures import page_figure, plain
from rankscope.metrics import chosen_metrics
from rankscope.nets import Transformer
from rankscope.paths import carried, decompose, lengths_chart
from rankscope.profiles import (
    MetricReader,
    Profile,
    ResidualShape,
    ShapeReader,
    cloud_chart,
    cloud_rows,
    curves_chart,
    one_pass,
    readings_table,
    sentence,
)
from rankscope.runs import Manifest, Network
from rankscope.theory import EXACT, RANK, THEOREMS, BoundView, Certificates, bounds_chart, bounds_sentence, certify

METRICS = ("relative_residual", "relative_mu")
MOST_KEPT = 24  # results: measurement, paths and bounds of eight positions of the controls
NOW = "now"
PANEL_WIDTH = 150  # pixels that a panel of the cloud needs across
ONE_TOKEN = "One token alone: there is no other for it to become equal to."
MOST_PATH_WORK = 2.5e10  # multiplications of a sum over paths that the page waits for: some seconds

Check = Callable[[], None]
Result = TypeVar("Result")


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
    require(controls.text.strip(), "there is no text to measure yet: write a few words", SettingError, "text")
    net = network_with(base, controls)
    X, _ = net.encode([controls.text], controls.tokens)
    check()
    (words,) = net.words([controls.text], controls.tokens)
    metrics, shapes = MetricReader(chosen_metrics("the explorer", METRICS)), ShapeReader()
    result = one_pass(net, X, readers=[metrics, shapes], progress=lambda *_: check(), check=True)
    rows = readings_table(metrics.result(), "", result.arithmetic)
    return PageMeasurement(controls, net, X, words, rows, result.arithmetic, shapes.result())


class Answers:
    """Answers the requests of pages, and keeps the `most` latest results."""

    def __init__(self, networks: NetworkCache, most: int = MOST_KEPT) -> None:
        self.networks, self.most = networks, most
        self._results: OrderedDict[tuple[str, Controls], Any] = OrderedDict()

    def parts(self, request: PageRequest, check: Check) -> Iterator[dict[str, Any]]:
        """Yield the parts that a request asks for; `check` is called on the way and may raise."""
        all_controls = {NOW: request.setting, **request.pinned}
        focus = all_controls.get(request.focus, request.setting)
        for name, part in (("curve", curve_part), ("cloud", cloud_part)):
            if name in request.parts:
                measured = {pin: self.measurement(controls, check) for pin, controls in all_controls.items()}
                yield {"part": name, **part(measured)}
        for name, make in (("paths", self.paths_part), ("bounds", self.bounds_part)):
            if name in request.parts:
                yield {"part": name, **make(focus, check)}

    def measurement(self, controls: Controls, check: Check) -> PageMeasurement:
        """One pass over the network under these controls."""
        net = self.networks.network(controls)  # also if the result is kept: a network in use is not dropped
        return self._once("measurement", controls, lambda: measure_page(net, controls, check))

    def paths_part(self, controls: Controls, check: Check) -> dict[str, Any]:
        """The shares of paths, summed by length; or a sentence that says why there are none."""
        measured = self.measurement(controls, check)
        arch, tokens = measured.net.arch, len(measured.words)
        layer_work = tokens * arch.width * (4 * arch.width + 2 * arch.mlp_width + 2 * tokens)
        if arch.layers**2 * layer_work > MOST_PATH_WORK:
            size = f"{arch.layers} layers of width {arch.width}"
            return {"why": f"Summed over paths, {size} are too many to wait for here: rankscope paths does it."}
        try:
            by_length = self._once("paths", controls, lambda: decompose(measured.net, measured.X).by_length(), check)
        except RankscopeError as error:
            return {"why": page_sentence(error)}
        views, chart = by_length.views(), lengths_chart(by_length.table)
        numbers = {"share": [view.share_of_all for view in views], "paths": [str(view.paths) for view in views]}
        return {
            "share": page_figure(chart.alone(0)),
            "residual": page_figure(chart.alone(1)),
            "said": carried(views),
            "numbers": plain(numbers),
        }

    def bounds_part(self, controls: Controls, check: Check) -> dict[str, Any]:
        """Bounds next to the measurement, a line for each theorem; or a sentence why there are none."""
        measured = self.measurement(controls, check)
        norms = self.networks.norms(self.networks.network(controls))
        try:
            certificates = self._once("bounds", controls, lambda: certify(measured.net, measured.X, norms=norms), check)
        except RankscopeError as error:
            return {"why": page_sentence(error)}
        views = sorted(certificates.views(), key=lambda view: ("says", "vacuous", "refused").index(view.state))
        lines = [bound_line(view) for view in views]
        return {"figures": bound_figures(certificates, views), "lines": lines, "said": bounds_sentence(views)}

    def _once(self, kind: str, controls: Controls, compute: Callable[[], Result], check: Check | None = None) -> Result:
        """A kept result, or a new one; while it is computed, `check` is called at every torch operation."""
        key = (kind, controls)
        for dropped in [kept for kept in self._results if not self.networks.holds(kept[1])]:
            del self._results[dropped]
        if key not in self._results:
            with nullcontext() if check is None else InterruptMode(check):
                self._results[key] = compute()
            while len(self._results) > self.most:
                self._results.popitem(last=False)
        self._results.move_to_end(key)
        return self._results[key]


def curve_part(measured: Mapping[str, PageMeasurement]) -> dict[str, Any]:
    """The residual by layer of the page and its pins, logarithmic and linear, and what it says."""
    profile = Profile.join([measurement.profile(name) for name, measurement in measured.items()])
    curves = profile.views("relative_residual")
    now, arch = measured[NOW], measured[NOW].net.arch
    log, linear = (replace(curves_chart(curves, log), legend=len(measured) > 1) for log in (True, False))
    return {
        "log": page_figure(log),
        "linear": page_figure(linear),
        "verdicts": {
            curve.variant: ONE_TOKEN if len(measured[curve.variant].words) == 1 else sentence(curve) for curve in curves
        },
        "about": {
            "tokens": len(now.words),
            **sizes(arch),
            "arithmetic": now.arithmetic,
            "own": {"mlp": arch.mlp != "none", "norm": arch.norm != "none"},
            "remedies": now.controls.remedies,
        },
        "numbers": {name: plain(measurement.curve()) for name, measurement in measured.items()},
    }


def cloud_part(measured: Mapping[str, PageMeasurement]) -> dict[str, Any]:
    """The tokens of the page and its pins as points: those of the same input on the same two axes."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, measurement in measured.items():
        groups.setdefault(measurement.input_key, []).append(name)
    tables = []
    for names in groups.values():
        words = measured[names[0]].words
        shapes = [(name, shape) for name in names for shape in measured[name].shapes]
        finite = [(name, shape._replace(R=shape.R.nan_to_num(0.0))) for name, shape in shapes]
        tables.append(cloud_rows(finite, 0, torch.arange(len(words)), words))
    rows = pl.concat(tables).sort(pl.col("variant").cast(pl.Enum([*measured])), maintain_order=True)
    charts = [cloud_chart(rows, magnified=magnified) for magnified in (False, True)]
    in_one_row = [replace(chart, columns=len(chart.panels), least=PANEL_WIDTH) for chart in charts]
    plain_cloud, magnified_cloud = map(page_figure, in_one_row)
    return {"plain": plain_cloud, "magnified": magnified_cloud, "words": measured[NOW].words}


def bound_line(bound: BoundView) -> dict[str, Any]:
    """For the page: what a theorem says of this network, or why it says nothing."""
    theorem = THEOREMS.get(bound.theorem)
    known = bound.log10_bound is not None and bound.log10_measured is not None
    return {
        **{name: getattr(bound, name) for name in ("theorem", "quantity", "state", "layer", "why")},
        **{name: getattr(theorem, name, "") for name in ("source", "says")},
        "side": bound.sign,
        "bound": bound.bound if known else None,
        "measured": bound.measured if known else None,
    }


def bound_figures(certificates: Certificates, bounds: list[BoundView]) -> dict[str, dict[str, Any]]:
    """A figure for each quantity with a bound, the one with most bounds first.

    Bounds that say nothing are not drawn, unless there are no others.
    """
    candidates = [bound for bound in bounds if bound.quantity != RANK and bound.theorem != EXACT]
    shown = [bound for bound in candidates if bound.state == "says"] or candidates
    counts = Counter(bound.quantity for bound in shown)
    rows = certificates.table.filter(pl.col("theorem").is_in([bound.theorem for bound in shown]))
    return {quantity: page_figure(bounds_chart(rows.filter(quantity=quantity))) for quantity, _ in counts.most_common()}


def page_sentence(error: RankscopeError) -> str:
    """The sentence of an error in the page's words, with a capital and a full stop."""
    text = in_page_words(str(error))
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"

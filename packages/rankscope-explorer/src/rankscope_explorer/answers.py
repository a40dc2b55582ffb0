"""The answer to a page: one measurement under its controls, in deviation arithmetic (`measure_page`), and of it the
curve, the cloud, paths and bounds, each as soon as it is computed.

Each part of an answer is a section of a result (`Profile`, `ByLength`, `Certificates`), as the report shows it, with
the sentence that a small card has room for, and pictures of one panel each, between which a reader chooses.

The curve and the cloud show the page's controls and those of its pins. Results are kept for a while, so that a pin
costs nothing; they hold their network, so they are dropped when `NetworkCache` drops it.
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
from rankscope.figures import Chart, Formula
from rankscope.metrics import chosen_metrics
from rankscope.nets import Transformer
from rankscope.paths import ByLength, carried, decompose
from rankscope.profiles import (
    MetricReader,
    Profile,
    ResidualShape,
    ShapeReader,
    cloud_rows,
    one_pass,
    readings_table,
    sentence,
)
from rankscope.report import cloud_views, section_json
from rankscope.results import Plot, Section, Table, Views
from rankscope.runs import Manifest, Network
from rankscope.theory import EXACT, RANK, BoundView, Certificates, bounds_sentence, certify, quantity
from rankscope_explorer.controls import RANDOM, Controls, PageRequest, in_page_words
from rankscope_explorer.jobs import InterruptMode
from rankscope_explorer.network_cache import NetworkCache, chosen_remedies, sizes

METRICS = ("relative_residual", "relative_mu")
MOST_KEPT = 24  # results: measurement, paths and bounds of eight positions of the controls
NOW = "now"
PANEL_WIDTH = 150  # pixels that a panel of the cloud needs across
ONE_TOKEN = "One token alone: there is no other for it to become equal to."
QUANTITIES = {"residual": "‖res‖", "mu": "µ", "diameter": "distance"}  # What is bounded, as a choice of the card
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
        if {"curve", "cloud"} & {*request.parts}:
            measured = {pin: self.measurement(controls, check) for pin, controls in all_controls.items()}
        if "curve" in request.parts:
            yield {"part": "curve", **section_json(curve_section(measured)), **curve_words(measured)}
        if "cloud" in request.parts:
            yield {"part": "cloud", **section_json(cloud_section(measured))}
        for name, section in (("paths", self.paths_section), ("bounds", self.bounds_section)):
            if name in request.parts:
                measurement = self.measurement(focus, check)
                try:
                    shown = section(measurement, check)
                except RankscopeError as error:
                    shown = Section(name, page_sentence(error))
                yield {"part": name, **section_json(shown)}

    def measurement(self, controls: Controls, check: Check) -> PageMeasurement:
        """One pass over the network under these controls."""
        net = self.networks.network(controls)  # also if the result is kept: a network in use is not dropped
        return self._once("measurement", controls, lambda: measure_page(net, controls, check))

    def paths_section(self, measured: PageMeasurement, check: Check) -> Section:
        """The shares of paths, summed by length; or a sentence that says why there are none."""
        arch, tokens = measured.net.arch, len(measured.words)
        layer_work = tokens * arch.width * (4 * arch.width + 2 * arch.mlp_width + 2 * tokens)
        if arch.layers**2 * layer_work > MOST_PATH_WORK:
            size = f"{arch.layers} layers of width {arch.width}"
            why = f"Summed over paths, {size} are too many to wait for here: rankscope paths does it."
            return Section("paths", why)
        by_length: ByLength = self._once(
            "paths", measured.controls, lambda: decompose(measured.net, measured.X).by_length(), check
        )
        (section,) = by_length.sections()
        (plot,) = section.plots
        views = [apart("share", plot.chart, 0), apart("residual", plot.chart, 1)]
        plot, tables = replace(plot, views=views), by_length.overview().tables
        return replace(section, sentence=carried(by_length.views()), plots=[plot], tables=tables)

    def bounds_section(self, measured: PageMeasurement, check: Check) -> Section:
        """Bounds next to the measurement, and a line for each theorem."""
        norms = self.networks.norms(self.networks.network(measured.controls))
        return bounds_section(
            self._once("bounds", measured.controls, lambda: certify(measured.net, measured.X, norms=norms), check)
        )

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


def curve_section(measured: Mapping[str, PageMeasurement]) -> Section:
    """The residual by layer of the page and its pins, logarithmic and linear."""
    section = Profile.join([measurement.profile(name) for name, measurement in measured.items()]).sections()[0]
    scales = dict(section.plots[0].views)
    views = [(scale, replace(scales[scale], legend=len(measured) > 1)) for scale in ("log", "linear")]
    return replace(section, plots=[replace(section.plots[0], views=views)])


def curve_words(measured: Mapping[str, PageMeasurement]) -> dict[str, Any]:
    """What the page says above its cards: what becomes of the tokens, now and of each pin, and what was measured."""
    now, arch = measured[NOW], measured[NOW].net.arch
    verdicts = {
        name: ONE_TOKEN if len(measurement.words) == 1 else sentence(measurement.profile(name).views()[0])
        for name, measurement in measured.items()
    }
    facts = {"tokens": len(now.words), **sizes(arch), "arithmetic": now.arithmetic, "remedies": now.controls.remedies}
    return {"verdicts": verdicts, "about": facts}


def cloud_section(measured: Mapping[str, PageMeasurement]) -> Section:
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
    views = [
        (label, replace(chart, columns=len(chart.panels), least=PANEL_WIDTH)) for label, chart in cloud_views(rows)
    ]
    return Section("The tokens, layer by layer", plots=[Plot("cloud", views)])


def bounds_section(certificates: Certificates) -> Section:
    """What is proved: a picture for each quantity with a bound, the one with most bounds first, and every theorem.

    Bounds that say nothing are not drawn, unless there are no others.
    """
    bounds = sorted(certificates.views(), key=lambda bound: ("says", "vacuous", "refused").index(bound.state))
    candidates = [bound for bound in bounds if bound.quantity != RANK and bound.theorem != EXACT]
    shown = [bound for bound in candidates if bound.state == "says"] or candidates
    rows = certificates.table.filter(pl.col("theorem").is_in([bound.theorem for bound in shown]))
    views: Views = []
    for name, _ in Counter(bound.quantity for bound in shown).most_common():
        (chart,) = Certificates(rows.filter(quantity=name), certificates.manifest).charts()
        views.append(apart(QUANTITIES.get(name, name), chart, title=Formula(quantity(name).symbol)))
    (section,) = certificates.sections()
    plots = [Plot("bounds", views)] if views else []
    return replace(section, sentence=bounds_sentence(bounds), plots=plots, tables=[theorems_table(bounds)])


def theorems_table(bounds: list[BoundView]) -> Table:
    """A line for each theorem: what it says of this network, or why it says nothing."""
    rows = []
    for bound in bounds:
        says = f"layer {bound.layer}: {bound.measured} {bound.sign} {bound.bound}"
        vacuous, refused = "holds, but its bound is vacuous", bound.why or "does not apply"
        rows.append([bound.theorem, {"says": says, "vacuous": vacuous, "refused": refused}[bound.state]])
    marked = {(row, 1) for row, bound in enumerate(bounds) if bound.state != "says"}
    return Table("", ["", ""], rows, marked, wordy=True)


def apart(label: str, chart: Chart, panel: int = 0, title: Formula | str = "") -> tuple[str, Chart]:
    """A panel as a view of its own, with this label; `title` stands along an axis that has none."""
    alone = chart.alone(panel)
    (shown,) = alone.panels
    return label, replace(alone, panels=[replace(shown, y=replace(shown.y, title=shown.y.title or title))])


def page_sentence(error: RankscopeError) -> str:
    """The sentence of an error in the page's words, with a capital and a full stop."""
    text = in_page_words(str(error))
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"

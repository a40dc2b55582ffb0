"""What a profile or a summary is shown as: its metrics by layer, and what each arithmetic can see.

`curves.py` asks for these sections; the report and the overview of several runs take some of the parts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from rankscope.figures import evenly, power, sparklines
from rankscope.metrics import direction_of, is_share, symbol_of
from rankscope.profiles.figures import arithmetics_chart, curves_chart
from rankscope.profiles.views import CurveView, zeros_note
from rankscope.results import Plot, Section, Table, Views, sentence

FLOORS = sentence("curves", "floors")
LAYERS = 33  # Columns at most: of more layers, so many evenly
Bounds = Mapping[str, Mapping[str, Any]]  # By metric, then by variant: what `curves_chart` takes as bounds


class Curved(Protocol):
    """What has metrics by layer: a profile or a summary."""

    @property
    def measured(self) -> tuple[int, str]:
        """How many things were measured, and what they are."""

    @property
    def metrics(self) -> list[str]:
        """The metrics, in the order they were asked for."""

    @property
    def arithmetics(self) -> list[str]:
        """The arithmetics that the network was run in, in order."""

    def views(self, metric: str) -> list[CurveView]:
        """What each line of a metric says."""

    def spread(self, metric: str) -> list[Table]:
        """How what was measured differs at the last layer."""


def curve_sections(measured: Curved, bounds: Bounds) -> list[Section]:
    """The section of the metrics, and one of the arithmetics where there are several."""
    lead, *further = measured.metrics
    count, noun = measured.measured
    statistic = sentence("curves", "of_excerpts" if noun == "excerpt" else "of_samples", excerpts=count)
    proved = sentence("curves", "proved") if bounds else ""
    filled = {"symbol": symbol_of(lead), "statistic": statistic, "floors": FLOORS, "proved": proved}
    both = _both(measured, lead, bounds.get(lead, {}))
    plots = [Plot("curves", both, sentence("curves", "caption", **filled))]
    for name in further:  # without what the large figure says already
        views = _both(measured, name, {})
        small = [(scale, replace(chart, legend=False, height=270, colour_bar=None)) for scale, chart in views]
        plots.append(Plot(f"curves-{name}", small, name.replace("_", " "), small=True))
    tables = [curve_table(measured.views(lead)), *measured.spread(lead)]
    heading, lead_in = "How uniform the tokens become", sentence("curves", "lead")
    sections = [Section(heading, lead_in, plots, tables, key="residual")]
    plots = []
    for k, (variant, curves) in enumerate(compared_arithmetics(measured).items()):
        caption = sentence("arithmetics", "caption", variant=variant, symbol=symbol_of(curves[0].metric))
        plots.append(Plot(f"arithmetics-{k}", [("", arithmetics_chart(curves))], caption))
    return sections + [Section("What each arithmetic can see", FLOORS, plots, key="arithmetics")] * bool(plots)


def _both(measured: Curved, metric: str, bounds: Mapping[str, Any]) -> Views:
    """Logarithmic and linear, the one first that shows more."""
    curves = measured.views(metric)
    log, linear = curves_chart(curves, True, bounds), curves_chart(curves, False)
    views = [("log", log), ("linear", linear)]
    powers = log.panels[0].y.powers
    return views[::-1] if powers is not None and powers.narrow else views


def by_variant(curves: Sequence[CurveView]) -> dict[str, list[CurveView]]:
    """The curves of each variant."""
    groups: dict[str, list[CurveView]] = {}
    for curve in curves:
        groups.setdefault(curve.variant, []).append(curve)
    return groups


def compared_arithmetics(measured: Curved) -> dict[str, list[CurveView]]:
    """By variant the curves of a residual, where there are several arithmetics to compare."""
    metric = next((name for name in measured.metrics if direction_of(name) == 1), None)
    if measured.measured[1] == "excerpt" or len(measured.arithmetics) < 2 or metric is None:
        return {}
    return by_variant(measured.views(metric))


def _arithmetics(measured: Curved) -> list[Section]:
    plots = []
    for k, (variant, curves) in enumerate(compared_arithmetics(measured).items()):
        caption = sentence("arithmetics", "caption", variant=variant, symbol=symbol_of(curves[0].metric))
        plots.append(Plot(f"arithmetics-{k}", [("", arithmetics_chart(curves))], caption))
    return [Section("What each arithmetic can see", FLOORS, plots, key="arithmetics")] if plots else []


def ends_table(curves: Sequence[CurveView], threshold: float | None = None) -> Table:
    """The first, the middle and the last number of each curve; floors where a line ends at one, and depths where they
    differ. With a threshold, of a share also the layer from which on it is at most that."""
    metric, rows = curves[0].metric, [[curve.label, *map(power, curve.ends)] for curve in curves]
    shapes = [sparklines(curve.log10[curve.first :].tolist())[0] for curve in curves]
    more, notes = {}, [zeros_note(curves)]
    if threshold is not None and len({curve.depth for curve in curves}) > 1:
        more["layers"] = [str(curve.depth) for curve in curves]
    if threshold is not None and is_share(metric):
        more["uniform"] = [_since(curve.uniform_from(threshold)).replace("layer ", "") or "no" for curve in curves]
        notes.append(f"uniform: below {threshold:g} from that layer on")
    if any(curve.floor_from is not None for curve in curves):
        more["at floor"] = [_since(curve.floor_from) for curve in curves]
    for cells in more.values():
        rows = [[*row, cell] for row, cell in zip(rows, cells, strict=True)]
    return Table(
        f"{metric}: {symbol_of(metric)}, {curves[0].statistic}", ["", "first", "middle", "last", *more], rows,
        note="\n".join(filter(None, notes)), curves=(f"layers {curves[0].first} →", shapes), spare=["middle"],
    )  # fmt: skip


def _since(layer: int | None) -> str:
    return "" if layer is None else f"from layer {layer}"


def curve_table(curves: Sequence[CurveView]) -> Table:
    """The centre of each curve by layer; noise is marked."""
    some = evenly(range(max((view.depth + 1 for view in curves), default=0)), LAYERS)
    rows, marked = [], set()
    for row, view in enumerate(curves):
        layers = [layer for layer in some if layer <= view.depth]
        marked |= {(row, column + 1) for column, layer in enumerate(layers) if view.noise[layer]}
        cells = [power(float(view.log10[layer])) for layer in layers]
        rows.append([view.label, *cells, *[""] * (len(some) - len(layers))])
    notes = [f"{curves[0].statistic.capitalize()}.", "○ at or below the floor." if marked else ""]
    note = " ".join(filter(None, [*notes, zeros_note(curves)]))
    return Table(f"{curves[0].metric} by layer", ["variant", *map(str, some)], rows, marked, note)

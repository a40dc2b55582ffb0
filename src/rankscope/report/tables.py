"""Tables of the page, as text."""

from collections.abc import Sequence

import polars as pl

from rankscope.depths.summary import EffectiveDepth
from rankscope.depths.views import ALL_LAYER_COLUMNS, MARKED_COLUMNS, NOISE
from rankscope.figures.style import evenly
from rankscope.figures.text import power
from rankscope.profiles import Profile, Summary
from rankscope.profiles.views import CurveView, zeros_note
from rankscope.report.content import Table, sentence
from rankscope.runs import Network
from rankscope.theory import Certificates
from rankscope.theory.views import failed_hypotheses, quantity

LAYERS = 33  # Columns at most: of more layers, so many evenly


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


def spread_table(summary: Summary, metric: str) -> Table:
    """How excerpts differ at the last layer: quantiles from their logs, which do not underflow."""
    rows = []
    for view in summary.views(metric):
        (low, high), (lower, upper) = view.log10_bands
        quantiles = [power(float(curve[-1])) for curve in (low, lower, view.log10, upper, high)]
        mean, sd, noise, count = (
            float(summary.curve(metric, name, variant=view.variant, arithmetic=view.arithmetic)[-1])
            for name in ("mean", "sd", "below_floor", "count")
        )
        rows.append([view.label, *quantiles, f"{mean:.3g}", f"{sd:.3g}", f"{noise:.0%}", f"{count:.0f}"])
    headings = ["5 %", "25 %", "median", "75 %", "95 %", "mean", "sd", "at floor", "excerpts"]
    return Table(f"{metric} over excerpts, at the last layer", ["variant", *headings], rows)


def depth_table(layers: pl.DataFrame) -> Table:
    """The layers of a depth card; what rounding may have decided is marked."""
    rows, headings = layers.to_dicts(), list(ALL_LAYER_COLUMNS)
    marked = {
        (row, headings.index(heading))
        for row, values in enumerate(rows) for heading, mark in MARKED_COLUMNS.items() if values[mark]
    }  # fmt: skip
    cells = [[cell(row).removesuffix(NOISE) for cell in ALL_LAYER_COLUMNS.values()] for row in rows]
    return Table("Layers", headings, cells, marked, sentence("depth", "layers"))


def effective_depth_table(depths: Sequence[EffectiveDepth]) -> Table:
    """Effective depths, each with its definition."""
    values = ["–" if effective.value is None else f"{effective.value:.3g}" for effective in depths]
    rows = [
        [depth.name.replace("_", " "), value, depth.definition] for depth, value in zip(depths, values, strict=True)
    ]
    return Table("Effective depth", ["", "layers", "what it is"], rows, wordy=True)


def certificate_table(certificates: Certificates, variant: str) -> Table:
    """A line per theorem that holds somewhere: at which layers, what it says at the last at which it says
    something, next to the measurement. Those that hold nowhere are named beneath."""
    bounds = certificates.views()
    rows = [
        [view.theorem, quantity(view.quantity).symbol, view.layers, str(view.layer), view.measured,
         f"{view.sign} {view.proved}" if view.state == "says" else view.proved, view.slack]
        for view in bounds
        if view.met_to
    ]  # fmt: skip
    none = [view.theorem for view in bounds if not view.met_to]
    headings = ["theorem", "of", "holds at layers", "at layer", "measured", "proved", "slack, decades"]
    notes = (
        ["Vacuous: the theorem holds, but its bound says nothing new (as large as the tokens, or zero)."]
        if rows
        else []
    )
    if rows and certificates.table["sample"].n_unique() > 1:
        notes.append("Numbers are those of the excerpt with the most slack.")
    if none:
        notes.append(f"A hypothesis fails from the first layer on, see below: {', '.join(none)}.")
    return Table(f"Certificates: {variant}", headings, rows, note=" ".join(notes))


def failing_table(certificates: Certificates, variant: str) -> Table:
    """A line per hypothesis that fails somewhere: its number, its limit, and the theorems it takes out."""
    rows = [
        [hypothesis.says, hypothesis.number, hypothesis.limit, ", ".join(hypothesis.theorems)]
        for hypothesis in failed_hypotheses(certificates.table)
    ]
    headings = ["hypothesis", "found", "must be", "so not"]
    return Table(f"Hypotheses that fail: {variant}", headings, rows, wordy=True, folded=True)


def checks(measured: Profile | Summary) -> list[dict[str, str]]:
    """What the run found about itself, in words."""
    return [
        {"variant": network.variant, "arithmetic": network.arithmetic, "said": _checked(network)}
        for network in measured.manifest.networks
    ]


def _checked(network: Network) -> str:
    """In words, of a check that is there what it says: other versions may have others."""
    checks = network.checks
    notes = [_rows(checks.get("rows_sum_to_one"), checks.get("largest_row_sum_defect"))]
    if isinstance(checks.get("padded_tokens"), int):
        notes.append(f"{checks['padded_tokens']} padded tokens left out")
    if isinstance(checks.get("dropout"), int | float):
        notes.append(f"dropout {checks['dropout']:g}")
    overflow = checks.get("first_layer_not_finite", "unknown")
    if overflow is None:
        notes.append("all layers finite")
    elif isinstance(overflow, int):
        notes.append(f"numbers overflow from layer {overflow}")
    asked = checks.get("arithmetic_asked", network.arithmetic)
    if asked != network.arithmetic:
        notes.append(f"run instead of {asked}, which has no rule for one of its parts")
    return "; ".join(notes)


def _rows(one: object, defect: object) -> str:
    if not isinstance(one, bool) or not isinstance(defect, int | float):
        return "attention was not looked at"
    if one:
        return f"attention rows sum to one within {defect:.1e}"
    return f"attention rows miss one by up to {defect:.2g}: theorems on averaging do not apply"

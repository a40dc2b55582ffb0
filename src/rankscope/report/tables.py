"""Tables of the page, as text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rankscope.figures.style import evenly
from rankscope.figures.text import power
from rankscope.profiles import Profile, Summary
from rankscope.profiles.views import CurveView, zeros_said
from rankscope.runs import Network
from rankscope.theory import Certificates
from rankscope.theory.views import failed_hypotheses, quantity

LAYERS = 33
"""Columns at most: of more layers, so many evenly."""


@dataclass(frozen=True)
class Table:
    """Headings and rows of text; `marked` are cells (row, column) that are only noise."""

    title: str
    headings: list[str]
    rows: list[list[str]]
    marked: set[tuple[int, int]] = field(default_factory=set)
    note: str = ""
    wordy: bool = False
    """Holds sentences, not numbers."""
    titled: bool = False
    """Its first column holds titles, which may take several lines."""
    folded: bool = False
    """Shown when asked for."""
    keys: list[list[Any]] = field(default_factory=list)
    """What each cell is sorted by; a table without them stays in its order."""


def curve_table(curves: Sequence[CurveView]) -> Table:
    """The centre of each curve by layer; noise is marked."""
    some = evenly(range(max((each.depth + 1 for each in curves), default=0)), LAYERS)
    rows, marked = [], set()
    for number, each in enumerate(curves):
        there = [layer for layer in some if layer <= each.depth]
        marked |= {(number, place + 1) for place, layer in enumerate(there) if each.noise[layer]}
        cells = [power(float(each.log10[layer])) for layer in there]
        rows.append([each.label, *cells, *[""] * (len(some) - len(there))])
    notes = [f"{curves[0].statistic.capitalize()}.", "○ at or below the floor." if marked else ""]
    said = " ".join(filter(None, [*notes, zeros_said(curves)]))
    return Table(f"{curves[0].metric} by layer", ["variant", *map(str, some)], rows, marked, said)


def spread_table(summary: Summary, metric: str) -> Table:
    """How excerpts differ at the last layer: quantiles from their logs, which do not underflow."""
    rows = []
    for each in summary.views(metric):
        (low, high), (lower, upper) = each.log10_bands
        quantiles = [power(float(curve[-1])) for curve in (low, lower, each.log10, upper, high)]
        mean, sd, noise, count = (
            float(summary.curve(metric, name, variant=each.variant, arithmetic=each.arithmetic)[-1])
            for name in ("mean", "sd", "below_floor", "count")
        )
        rows.append([each.label, *quantiles, f"{mean:.3g}", f"{sd:.3g}", f"{noise:.0%}", f"{count:.0f}"])
    headings = ["5 %", "25 %", "median", "75 %", "95 %", "mean", "sd", "at floor", "excerpts"]
    return Table(f"{metric} over excerpts, at the last layer", ["variant", *headings], rows)


def bound_tables(found: Certificates, variant: str) -> list[Table]:
    """What theorems say, and the hypotheses that fail, where there are any."""
    both = [certificate_table(found, variant), failing_table(found, variant)]
    return [each for each in both if each.rows]


def certificate_table(found: Certificates, variant: str) -> Table:
    """A line per theorem that holds somewhere: at which layers, what it says at the last at which it says
    something, next to the measurement. Those that hold nowhere are named beneath."""
    bounds = found.views()
    rows = [
        [each.theorem, quantity(each.quantity).symbol, each.layers, str(each.layer), each.measured,
         f"{each.sign} {each.proved}" if each.state == "says" else each.proved, each.slack]
        for each in bounds
        if each.met_to
    ]  # fmt: skip
    none = [each.theorem for each in bounds if not each.met_to]
    headings = ["theorem", "of", "holds at layers", "at layer", "measured", "proved", "slack, decades"]
    notes = ["Vacuous: it holds, but says no more than is known anyway."] if rows else []
    if rows and found.table["sample"].n_unique() > 1:
        notes.append("Numbers are those of the excerpt with the most slack.")
    if none:
        notes.append(f"A hypothesis fails from the first layer on, see below: {', '.join(none)}.")
    return Table(f"Certificates: {variant}", headings, rows, note=" ".join(notes))


def failing_table(found: Certificates, variant: str) -> Table:
    """A line per hypothesis that fails somewhere: its number, its limit, and the theorems it takes out."""
    rows = [
        [each.says, each.number, each.limit, ", ".join(each.theorems)]
        for each in failed_hypotheses(found.table)
    ]
    headings = ["hypothesis", "found", "must be", "so not"]
    return Table(f"Hypotheses that fail: {variant}", headings, rows, wordy=True, folded=True)


def comparison_table(outcome: dict[str, Any]) -> Table:
    """What the paper says, and what came out here."""
    marks = {True: "agrees", False: "differs", None: "no number to compare"}
    rows = [
        [str(each.get("what", "")), str(each.get("published", "")), str(each.get("ours", "")),
         ": ".join(filter(None, (str(each.get("verdict") or marks.get(each.get("agrees"), "")),
                                 str(each.get("because", "")))))]
        for each in outcome.get("comparisons", [])
    ]  # fmt: skip
    return Table("", ["", "published", "ours", ""], rows, wordy=True)


def shown_tables(outcome: dict[str, Any]) -> list[Table]:
    """The tables that a study has for its page."""
    return [
        Table(
            str(each["title"]), [*map(str, each["headings"])], [[*map(str, row)] for row in each["rows"]],
            note=str(each.get("note", "")), wordy=bool(each.get("wordy")),
        )
        for each in outcome.get("shown", [])
        if each["rows"]
    ]  # fmt: skip


def checks(measured: Profile | Summary) -> list[dict[str, str]]:
    """What the run found about itself, in words."""
    return [
        {"variant": network.variant, "arithmetic": network.arithmetic, "said": _checked(network)}
        for network in measured.manifest.networks
    ]


def _checked(network: Network) -> str:
    """In words, of a check that is there what it says: other versions may have others."""
    found = network.checks
    said = [_rows(found.get("rows_sum_to_one"), found.get("largest_row_sum_defect"))]
    if isinstance(found.get("padded_tokens"), int):
        said.append(f"{found['padded_tokens']} padded tokens left out")
    if isinstance(found.get("dropout"), int | float):
        said.append(f"dropout {found['dropout']:g}")
    overflow = found.get("first_layer_not_finite", "unknown")
    if overflow is None:
        said.append("all layers finite")
    elif isinstance(overflow, int):
        said.append(f"numbers overflow from layer {overflow}")
    asked = found.get("arithmetic_asked", network.arithmetic)
    if asked != network.arithmetic:
        said.append(f"run instead of {asked}, which has no rule for one of its parts")
    return "; ".join(said)


def _rows(one: object, defect: object) -> str:
    if not isinstance(one, bool) or not isinstance(defect, int | float):
        return "attention was not looked at"
    if one:
        return f"attention rows sum to one within {defect:.1e}"
    return f"attention rows miss one by up to {defect:.2g}: theorems on averaging do not apply"

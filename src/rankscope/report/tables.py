"""Tables of the page, as text."""

import math
from dataclasses import dataclass, field
from typing import Any

from rankscope.figures import power
from rankscope.profiles import Profile, Summary
from rankscope.profiles.shown import middle
from rankscope.runs import Network
from rankscope.theory import Certificates

SYMBOLS = {"residual": "‖res X‖₁,∞", "mu": "µ(X)", "diameter": "diameter", "affine_rank": "affine rank"}
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


def curve_table(measured: Profile | Summary, metric: str) -> Table:
    """Geometric mean over samples (and heads), or of a corpus the median, by layer; noise is marked."""
    rows, marked = [], set()
    lines = {line: middle(measured, metric, *line) for line in measured.lines(metric)}
    some = _some(max((len(curve) for curve, _ in lines.values()), default=0))
    for number, ((variant, arithmetic), (curve, noise)) in enumerate(lines.items()):
        there = [layer for layer in some if layer < len(curve)]
        marked |= {(number, place + 1) for place, layer in enumerate(there) if noise[layer]}
        name = variant if len(measured.arithmetics) == 1 else f"{variant}, {arithmetic}"
        rows.append([name, *(power(curve[layer]) for layer in there), *[""] * (len(some) - len(there))])
    said = "○ at or below the floor." if marked else ""
    return Table(f"{metric} by layer", ["variant", *map(str, some)], rows, marked, said)


def _some(number: int) -> list[int]:
    if number <= LAYERS:
        return list(range(number))
    return [round(k * (number - 1) / (LAYERS - 1)) for k in range(LAYERS)]


def certificate_table(found: Certificates, variant: str) -> Table:
    """A line per theorem that holds somewhere: at which layers, what it says at the last at which it says
    something, next to the measurement. Those that hold nowhere are named beneath."""
    rows, none = [], []
    for row in found.summary().iter_rows(named=True):
        if not row["met_to"]:
            none.append(row["theorem"])
            continue
        says = row["says_at"] is not None
        rank = row["quantity"] == "affine_rank"
        sign = "≤" if row["kind"] == "upper" else "≥"
        met = "1" if row["met_to"] == 1 else f"1–{row['met_to']}"
        at = str(row["says_at"] or row["met_to"])
        bound = f"{sign} {_number(row['log10_bound'], rank)}" if says else "vacuous"
        measured = _number(row["log10_measured"], rank)
        slack = f"{row['slack']:.3g}" if says and row["slack"] is not None else ""
        rows.append(
            [row["theorem"], SYMBOLS.get(row["quantity"], row["quantity"]), met, at, measured, bound, slack]
        )
    headings = ["theorem", "of", "holds at layers", "at layer", "measured", "proved", "slack, decades"]
    notes = ["Vacuous: it holds, but says no more than is known anyway."] if rows else []
    if rows and found.table["sample"].n_unique() > 1:
        notes.append("Numbers are those of the excerpt with the most slack.")
    if none:
        notes.append(f"A hypothesis fails from the first layer on, see below: {', '.join(none)}.")
    return Table(f"Certificates: {variant}", headings, rows, note=" ".join(notes))


def failing_table(found: Certificates, variant: str) -> Table:
    """A line per hypothesis that fails somewhere: its number, its limit, and the theorems it takes out."""
    failing: dict[tuple[str, str], dict[str, float]] = {}
    for theorem, hypotheses in found.table.select("theorem", "hypotheses").iter_rows():
        for each in hypotheses:
            if not each["met"]:
                failing.setdefault((each["says"], each["limit"]), {}).setdefault(theorem, each["number"])
    rows = [
        [says, f"{next(iter(numbers.values())):.4g}", limit, ", ".join(numbers)]
        for (says, limit), numbers in failing.items()
    ]
    headings = ["hypothesis", "found", "must be", "so not"]
    return Table(f"Hypotheses that fail: {variant}", headings, rows, wordy=True, folded=True)


def comparison_table(outcome: dict[str, Any]) -> Table:
    """What the paper says, and what came out here."""
    marks = {True: "agrees", False: "differs", None: "no number to compare"}
    rows = [
        [str(each.get("what", "")), str(each.get("published", "")), str(each.get("ours", "")),
         ": ".join(filter(None, (marks.get(each.get("agrees"), ""), str(each.get("because", "")))))]
        for each in outcome.get("comparisons", [])
    ]  # fmt: skip
    return Table("", ["", "published", "ours", ""], rows, wordy=True)


def _number(log10: float | None, rank: bool) -> str:
    if log10 is None or math.isnan(log10):
        return "–"
    return str(round(10**log10)) if rank else power(log10)


def checks(measured: Profile | Summary) -> list[dict[str, str]]:
    """What the run found about itself, in words."""
    return [
        {
            "variant": network.variant,
            "arithmetic": network.arithmetic,
            "said": _checked(network),
        }
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
        said.append(f"run instead of {asked}, which has no rule for its kernel")
    return "; ".join(said)


def _rows(one: object, defect: object) -> str:
    if not isinstance(one, bool) or not isinstance(defect, int | float):
        return "attention was not looked at"
    if one:
        return f"attention rows sum to one within {defect:.1e}"
    return f"attention rows miss one by up to {defect:.2g}: theorems on averaging do not apply"

"""What certificates show of themselves: a card in a notebook, a few lines in a terminal."""

import math
from typing import TYPE_CHECKING

import polars as pl

from rankscope.cards import card, counted, lines
from rankscope.figures import power

if TYPE_CHECKING:
    from rankscope.theory.certificates import Certificates
    from rankscope.theory.critical import CriticalSkip
    from rankscope.theory.depth import CollapseDepth

SIZES = {
    "residual": "‖res X‖₁,∞",
    "mu": "‖res X‖F",
    "diameter": "largest distance",
    "affine_rank": "rank res X",
}
HEADINGS = ("theorem", "of", "layers", "at layer", "measured", "", "bound", "slack")


def certificates_repr(found: "Certificates") -> str:
    """A line per theorem whose hypotheses are met from layer 1 on: what is measured, and the bound."""
    met = found.summary().filter(pl.col("met_to") > 0)
    rows = [_row(row) for row in met.iter_rows(named=True)]
    said = [
        [name, quantity, f"layer {at}", f"{measured}{', ' if bound == 'vacuous' else f' {sign} '}{bound}"]
        for name, quantity, _, at, measured, sign, bound, _ in rows
    ]
    return lines(certificates_title(found, len(met)), said)


def certificates_title(found: "Certificates", met: int) -> str:
    """How much was asked and how much of it applies."""
    return (
        f"Certificates: {counted(len(found.theorems), 'theorem')}, hypotheses of {met} met, "
        f"{counted(found.table['sample'].n_unique(), 'sample')}"
    )


def certificates_card(found: "Certificates") -> str:
    """Bounds and measurement in a figure, and the theorems whose hypotheses are met from layer 1 on."""
    summary = found.summary()
    met = summary.filter(pl.col("met_to") > 0)
    rows = [_row(row) for row in met.iter_rows(named=True)]
    drawable = found.table.filter(pl.col("met") & (pl.col("quantity") != "affine_rank"))
    figure = None if drawable.is_empty() else found.plot(int(drawable["sample"][0]))
    notes = ["Slack in decades. Figure: the first sample; table: the loosest."] if rows else []
    unmet = summary.filter(pl.col("met_to") == 0)["theorem"].to_list()
    if unmet:
        notes.append(f"Hypotheses not met: {', '.join(unmet)}. summary() says which and why.")
    if len(found.broken()):
        notes.append("A measurement contradicts a theorem: please report this network.")
    return card(certificates_title(found, len(met)), figure, HEADINGS, rows, notes)


def depth_title(depth: "CollapseDepth") -> str:
    """What was measured."""
    layers = depth.measured["layer"].to_list()
    there = [layer for layer in layers if layer is not None]
    if not there:
        said = f"no sample of {len(layers)} is uniform at any layer"
    elif len(there) < len(layers):
        said = f"{len(there)} of {len(layers)} samples uniform by layer {max(there)}"
    else:
        said = f"uniform by layer {max(there)}, in {counted(len(layers), 'sample')}"
    return f"CollapseDepth to {depth.threshold:g}: {said}"


def depth_rows(depth: "CollapseDepth") -> list[list[str]]:
    """A line per theorem that proves something of every sample: the weakest of what it says."""
    rows = []
    for (name, kind), part in depth.guaranteed.group_by("theorem", "kind", maintain_order=True):
        layers = part["layer"].to_list()
        if not layers or any(layer is None for layer in layers):
            continue
        upper = kind == "upper"
        said = f"by layer {max(layers)}" if upper else f"not up to layer {min(layers)}"
        rows.append([str(name), "uniform" if upper else "apart", said])
    return rows


def depth_repr(depth: "CollapseDepth") -> str:
    """What was measured, and what is proved."""
    return lines(depth_title(depth), depth_rows(depth))


def depth_card(depth: "CollapseDepth") -> str:
    """What was measured, and what each theorem proves of every sample."""
    rows = depth_rows(depth)
    notes = [] if rows else ["No theorem proves or excludes it for every sample."]
    headings = ("theorem", "proves tokens", "for every sample")
    return card(depth_title(depth), depth.plot() if rows else None, headings, rows, notes)


def critical_repr(found: "CriticalSkip") -> str:
    """The weights at which collapse stops, each with what was found."""
    rows = [
        [name, "–" if weight is None else f"{weight:.4g}", why]
        for name, weight, why in (
            ("measured", found.weight, found.why),
            ("in theory", found.theory, found.theory_why),
        )
    ]
    return "\n  ".join(
        ["CriticalSkip", *("  ".join([row[0].ljust(9), row[1].ljust(6), row[2]]) for row in rows)]
    )


def _row(row: dict[str, object]) -> list[str]:
    says = row["says_at"] is not None
    quantity = str(row["quantity"])
    return [
        str(row["theorem"]),
        SIZES[quantity],
        f"1–{row['met_to']}",
        str(row["says_at"] or row["met_to"]),
        _size(quantity, row["log10_measured"]),
        "≤" if row["kind"] == "upper" else "≥",
        _size(quantity, row["log10_bound"]) if says else "vacuous",
        f"{row['slack']:.3g}" if says else "",
    ]


def _size(quantity: str, log10: object) -> str:
    if not isinstance(log10, float) or math.isnan(log10):
        return "–"
    return str(round(10**log10)) if quantity == "affine_rank" else power(log10)

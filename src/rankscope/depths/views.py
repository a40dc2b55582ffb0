"""A depth card as text: the cells of its tables, the same in a terminal, a notebook and the report."""

from collections.abc import Callable, Mapping
from typing import Any

import polars as pl

from rankscope.depths.summary import in_percent

Row = Mapping[str, Any]
SHOWN_HEADS = 5  # Heads that are shown at either end
NOISE = " ○"  # After a number that rounding may have decided


def _signed(name: str) -> Callable[[Row], str]:
    return lambda row: _number(row[name], "+z.2f")


def _lost(name: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        mark = NOISE if row[f"{name}_below_floor"] else ""
        return "–" if row[name] is None else f"{in_percent(row[name])}{mark}"

    return cell


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


def _rank(row: Row) -> str:
    mark = NOISE if row["rank_doubtful"] else ""
    return "–" if row["rank"] is None else f"{row['rank']:.4g}{mark}"


HEAD_COLUMNS: dict[str, Callable[[Row], str]] = {
    "layer": lambda row: str(row["layer"]),
    "head": lambda row: str(row["head"]),
    "lost": _lost("lost"),
    "of res": _lost("lost_residual"),
    "share": _signed("share"),
    "at res": _signed("residual_share"),
    "cosine": _signed("cosine"),
    "entropy": lambda row: _number(row["entropy"], ".2f"),
    "sink": lambda row: _number(row["sink"], ".2f"),
}
"""Headings of the table of heads, each with what stands in a row under it."""
LAYER_COLUMNS: dict[str, Callable[[Row], str]] = {
    **{heading: cell for heading, cell in HEAD_COLUMNS.items() if heading != "head"},
    "influence": lambda row: _number(row["influence"], ".3f"),
    "rank": _rank,
}
"""The same of layers."""
ALL_LAYER_COLUMNS: dict[str, Callable[[Row], str]] = {
    **LAYER_COLUMNS,
    "attention": _signed("share_attention"),
    "MLP": _signed("share_mlp"),
    "biases": _signed("share_bias"),
    "sinks": lambda row: _number(row["sink_heads"], ".0%"),
}
"""With parts of the share, and the heads that have a sink, where there is room."""


MARKED_COLUMNS = {"lost": "lost_below_floor", "of res": "lost_residual_below_floor", "rank": "rank_doubtful"}
"""Headings whose numbers rounding may have decided, with the column of a card's table that says so."""
LEAVES = ("sinks", "biases", "MLP", "attention", "entropy", "sink", "rank", "influence", "cosine")
"""The columns that go where there is little room, in this order."""


def norms_sentence(norms: pl.DataFrame) -> str:
    """What norms do to the affine rank of the tokens."""
    if norms.is_empty():
        return "There are no norms."
    changed = norms.filter(pl.col("rank_before") != pl.col("rank_after"))
    doubt = " Rounding may have decided some ranks (○)." if norms["rank_doubtful"].any() else ""
    if changed.is_empty():
        return f"Each of {norms.height} norms keeps the affine rank of the tokens.{doubt}"
    steps = [f"{row['norm_name']} of layer {row['layer']} ({row['rank_before']:.4g} to {row['rank_after']:.4g})"
             for row in changed.head(3).iter_rows(named=True)]  # fmt: skip
    more = f" and {changed.height - 3} more" if changed.height > 3 else ""
    return f"{changed.height} of {norms.height} norms change the affine rank: {', '.join(steps)}{more}.{doubt}"

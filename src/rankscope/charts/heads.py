"""The heads as a map, layer by head: how each contracts, and what it does to the output."""

import math
from typing import Any

import polars as pl

from rankscope.charts.escaping import Figure
from rankscope.charts.style import DIVERGING, HOVER, SEQUENTIAL, figure
from rankscope.errors import MetricError, one_of
from rankscope.paths.views import head_means

COLUMNS = {
    "contraction": "contraction: µ of what a head says over µ of what it reads",
    "averaging": "averaging: the same without the head's weights",
    "dobrushin": "Dobrushin's coefficient of its attention",
    "share": "share of the output that passes through it",
    "residual_share": "share of the output's residual that passes through it",
}
"""Columns of `Decomposition.by_head`, and what each is."""
LABELLED = 400
"""Heads up to which each has its number written into it."""


def heads(table: pl.DataFrame, column: str = "contraction") -> Figure:
    """A square for each head, mean over samples. `table` is `Decomposition.by_head()`.

    Shares have signs: blue adds to the output, orange takes away from it.
    """
    if column not in COLUMNS:
        raise MetricError(one_of("column", column, COLUMNS))
    means = head_means(table)
    layers, numbers = (means[name].unique().sort().to_list() for name in ("layer", "head"))
    rows = [means.filter(layer=layer) for layer in layers]
    grid = [[math.nan if value is None else value for value in row[column].to_list()] for row in rows]
    seen = [abs(value) for line in grid for value in line if math.isfinite(value)]
    signed, limit = "share" in column, max(seen, default=0.0) or 1.0
    trace: dict[str, Any] = {
        "type": "heatmap", "x": numbers, "y": layers, "z": grid, "xgap": 1, "ygap": 1,
        "colorscale": DIVERGING if signed else SEQUENTIAL, "zmin": -limit if signed else 0, "zmax": limit,
        "colorbar": {"thickness": 10, "outlinewidth": 0, "tickformat": ".1%" if signed else ".2~g"},
        "text": [[_said(each) for each in row.iter_rows(named=True)] for row in rows],
        "hovertemplate": HOVER,
    }  # fmt: skip
    if len(layers) * len(numbers) <= LABELLED:
        trace["texttemplate"] = "%{z:+.1%}" if signed else "%{z:.2f}" if limit >= 0.1 else "%{z:.0e}"
        trace["textfont"] = {"size": 10}
    axes = {
        axis: {
            "title": {"text": name},
            "dtick": max(1, len(each) // 12),
            "showgrid": False,
            "zeroline": False,
        }
        for axis, name, each in (("xaxis", "head", numbers), ("yaxis", "layer", layers))
    }
    return figure(
        [trace],
        {"height": max(240, min(720, 80 + 34 * len(layers))), **axes},
        means.to_dict(as_series=False),
        f"{COLUMNS[column].capitalize()}, for {len(layers)} layers of {len(numbers)} heads; from "
        f"{min(seen, default=math.nan):.3g} to {max(seen, default=math.nan):.3g}.",
    )


def _said(head: dict[str, Any]) -> str:
    """What a head does, in words; what has no number is passed over."""
    lines = [f"layer {head['layer']}, head {head['head']}"]
    if head["norm"] == 0:
        return f"{lines[0]}<br>does not speak"
    if head["contraction"] is not None:
        lines.append(f"what it says varies <b>{head['contraction']:.3g}</b> times what it reads")
    if head["averaging"] is not None and head["dobrushin"] is not None:
        lines.append(f"its averaging alone: {head['averaging']:.3g} (Dobrushin {head['dobrushin']:.3g})")
    if head["share"] is not None:
        lines.append(f"{head['share']:+.1%} of the output passes through it")
    if head["residual_share"] is not None:
        does = "holds tokens apart" if head["residual_share"] > 0 else "draws tokens together"
        lines.append(f"{head['residual_share']:+.1%} of the output's residual: {does}")
    return "<br>".join(lines)

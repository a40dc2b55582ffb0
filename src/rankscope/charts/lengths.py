"""Paths by their length: what they carry of the output, and how uniform their sum is."""

import math
from collections.abc import Sequence
from typing import Any

import polars as pl

from rankscope.charts.escaping import Figure
from rankscope.charts.powers import Powers
from rankscope.charts.style import HOVER, colour, figure, heading, symbol, trace
from rankscope.figures.text import power
from rankscope.paths.views import LengthView, counted_paths, length_views

SAID = {"embedding": "from the embedding", "bias": "from biases"}
COLOURS = {"embedding": 0, "bias": 4}
PANELS = ("what the paths of a length carry", "how uniform their sum T is")
NOISE = "<br>at the floor: rounding noise"


def lengths(table: pl.DataFrame) -> Figure:
    """Left: the share of the output by length, apart by where paths start. Right: the relative residual of
    the sum of each length's terms, a mark a sample, hollow where it is noise. `table` is `ByLength.table`."""
    views = length_views(table)
    rows = table.filter(pl.col("start") != "all")
    starts = {
        "embedding": [(each.share, each.paths, each.norm) for each in views],
        "bias": [(each.from_biases, each.bias_paths, each.bias_norm) for each in views],
    }
    data: list[dict[str, Any]] = []
    for start, bars in starts.items():
        if any(norm > 0 for *_, norm in bars):
            data.append({
                "type": "bar", "x": [each.length for each in views], "y": [share for share, *_ in bars],
                "name": SAID[start], "marker": {"color": colour(COLOURS[start])},
                "text": [f"length {each.length}, {SAID[start]}<br>{counted_paths(paths)} "
                         f"path{'s' * (paths != 1)}<br><b>{_percent(share, '+.1%')}</b> of the output"
                         for each, (share, paths, _) in zip(views, bars, strict=True)],
                "textposition": "none", "hovertemplate": HOVER, "xaxis": "x", "yaxis": "y",
            })  # fmt: skip
    residuals, axis = _residuals(rows, views)
    last = max((each.length for each in views), default=0)
    title = {"text": "length of the path: heads in it"}
    across = {"title": title, "dtick": max(1, last // 12), "zeroline": False}
    return figure(
        data + residuals,
        {
            "xaxis": across,
            "xaxis2": {**across, "range": [-0.3, last + 0.3]},
            "yaxis": {"title": {"text": "share of the output"}, "tickformat": ".0%"},
            "yaxis2": axis.axis("‖res T‖<sub>1,∞</sub> / ‖T‖<sub>1,∞</sub>"),
            "annotations": [heading(text, panel) for panel, text in enumerate(PANELS)],
            "bargap": 0.25,
        },
        rows.to_dict(as_series=False),
        "Share of the output by length of the path: "
        + ", ".join(f"{each.length}: {_percent(each.share, '.0%')}" for each in views)
        + ".",
        panels=2,
    )


def _percent(share: float, form: str) -> str:
    return f"{share:{form}}" if math.isfinite(share) else "no number"


def _residuals(rows: pl.DataFrame, views: Sequence[LengthView]) -> tuple[list[dict[str, Any]], Powers]:
    there = rows.filter(
        pl.col("start") == "embedding", pl.col("norm") > 0, pl.col("relative_residual") > 0
    ).with_columns(pl.col("relative_residual").log10().alias("log10"))
    axis = Powers(there["log10"].to_list())
    means = [each for each in views if math.isfinite(each.log10_residual)]
    said = [
        f"length {length}, sample {sample}<br><b>{power(k)}</b>{NOISE if noise else ''}"
        for length, sample, k, noise in there.select("length", "sample", "log10", "below_floor").iter_rows()
    ]
    places = axis.place([each.log10_residual for each in means])
    line = trace([each.length for each in means], places, panel=1, line={"color": colour(0), "width": 1.6})
    marks = trace(there["length"].to_list(), axis.place(there["log10"].to_list()), said, 1, mode="markers")
    symbols = [symbol(0, noise) for noise in there["below_floor"]]
    marks["marker"] = {"size": 7, "color": colour(0), "opacity": 0.8, "symbol": symbols}
    return [{**each, "showlegend": False} for each in (line, marks)], axis

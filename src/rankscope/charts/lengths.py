"""Paths by their length: what they carry of the output, and how uniform their sum is."""

import math
from typing import Any

import polars as pl

from rankscope.charts.powers import Powers
from rankscope.charts.safe import Figure
from rankscope.charts.style import HEIGHT, colour, figure, heading, symbol
from rankscope.figures import power

SAID = {"embedding": "from the embedding", "bias": "from biases"}
COLOURS = {"embedding": 0, "bias": 4}
NOISE = "<br>at the floor: rounding noise"


def lengths(table: pl.DataFrame) -> Figure:
    """Left: the share of the output by length, apart by where paths start. Right: the relative residual of
    the sum of each length's terms, a mark a sample, hollow where it is noise. `table` is `ByLength.table`."""
    rows = table.filter(pl.col("start") != "all")
    means = rows.group_by("start", "length", maintain_order=True).agg(
        pl.col("share", "norm").mean(), pl.col("paths").first()
    )
    starts = [start for start in SAID if means.filter(pl.col("start") == start, pl.col("norm") > 0).height]
    data: list[dict[str, Any]] = []
    for start in starts:
        part = means.filter(start=start).sort("length")
        data.append({
            "type": "bar", "x": part["length"].to_list(), "y": part["share"].to_list(),
            "name": SAID[start], "marker": {"color": colour(COLOURS[start])},
            "text": [f"length {length}, {SAID[start]}<br>{counted(paths)}<br>"
                     f"<b>{_percent(share, '+.1%')}</b> of the output"
                     for length, share, paths in part.select("length", "share", "paths").iter_rows()],
            "textposition": "none", "hovertemplate": "%{text}<extra></extra>",
        })  # fmt: skip
    residuals, axis = _residuals(rows)
    last = int(table["length"].to_numpy().max(initial=0))
    across = {
        "title": {"text": "length of the path: heads in it"},
        "dtick": max(1, last // 12),
        "zeroline": False,
    }
    own = means.filter(start="embedding").sort("length")
    return figure(
        data + residuals,
        {
            "height": HEIGHT,
            "xaxis": across,
            "xaxis2": {**across, "range": [-0.3, last + 0.3]},
            "yaxis": {"title": {"text": "share of the output"}, "tickformat": ".0%"},
            "yaxis2": axis.axis("‖res T‖<sub>1,∞</sub> / ‖T‖<sub>1,∞</sub>"),
            "annotations": [
                heading("what the paths of a length carry", 0),
                heading("how uniform their sum T is", 1),
            ],
            "bargap": 0.25,
        },
        table.filter(pl.col("start") != "all").to_dict(as_series=False),
        "Share of the output by length of the path: "
        + ", ".join(
            f"{length}: {_percent(share, '.0%')}"
            for length, share in own.select("length", "share").iter_rows()
        )
        + ".",
        panels=2,
    )


def _percent(share: float, form: str) -> str:
    return f"{share:{form}}" if math.isfinite(share) else "no number"


def counted(paths: str) -> str:
    """How many paths, in words."""
    number = int(paths)
    if number == 1:
        return "one path"
    return f"{number:,} paths" if number < 10**12 else f"{power(math.log10(number))} paths"


def _residuals(rows: pl.DataFrame) -> tuple[list[dict[str, Any]], Powers]:
    there = rows.filter(
        pl.col("start") == "embedding", pl.col("norm") > 0, pl.col("relative_residual") > 0
    ).with_columns(pl.col("relative_residual").log10().alias("log10"))
    axis = Powers(there["log10"].to_list())
    middle = there.group_by("length").agg(pl.col("log10").median()).sort("length")
    line = {"type": "scatter", "xaxis": "x2", "yaxis": "y2", "showlegend": False}
    said = [
        f"length {length}, sample {sample}<br><b>{power(k)}</b>{NOISE if noise else ''}"
        for length, sample, k, noise in there.select("length", "sample", "log10", "below_floor").iter_rows()
    ]
    return [
        {**line, "mode": "lines", "x": middle["length"].to_list(), "y": axis.place(middle["log10"].to_list()),
         "hoverinfo": "skip", "line": {"color": colour(0), "width": 1.6}},
        {**line, "mode": "markers", "x": there["length"].to_list(), "y": axis.place(there["log10"].to_list()),
         "text": said, "hovertemplate": "%{text}<extra></extra>",
         "marker": {"size": 7, "color": colour(0), "opacity": 0.8,
                    "symbol": [symbol(0, noise) for noise in there["below_floor"].to_list()]}},
    ], axis  # fmt: skip

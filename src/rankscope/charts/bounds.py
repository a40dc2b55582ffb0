"""What is proved next to what is measured: a panel for each quantity, every bound to where it holds."""

import math
from typing import Any

import polars as pl

from rankscope.charts.curves import layer_axis
from rankscope.charts.escaping import Figure, escaped
from rankscope.charts.powers import Powers
from rankscope.charts.style import FAINT, INK, colour, figure, heading, suffix, symbol, trace
from rankscope.errors import TheoremError
from rankscope.figures.text import power
from rankscope.theory import Certificates
from rankscope.theory.views import plotted_quantities, quantity

SAVED = ("theorem", "sample", "layer", "quantity", "kind", "met", "vacuous", "log10_bound", "log10_measured",
         "log10_size", "slack")  # fmt: skip
"""Columns of the CSV."""
MARKED = {"mode": "lines+markers"}


def bounds(certificates: Certificates, sample: int = 0) -> Figure:
    """By layer, on an axis of powers: the measurement, the tokens' own size, and the bounds of each theorem
    whose hypotheses are met; hollow marks where a bound is vacuous."""
    table = certificates.table.filter(sample=sample)
    shown = plotted_quantities(table)
    if not shown:
        raise TheoremError("a figure needs a bound of residual, mu or diameter; ranks alone were certified")
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {"annotations": []}
    number = 0
    for panel, bounded in enumerate(shown):
        rows = table.filter(quantity=bounded)
        logs = pl.concat([rows["log10_measured"], rows["log10_size"], rows["log10_bound"]])
        axis = Powers(logs.drop_nulls())
        one = rows.filter(theorem=rows["theorem"][0]).sort("layer")
        once = {"panel": panel, "showlegend": panel == 0}
        dotted = {"dash": "dot", "width": 1.4, "color": FAINT}
        data.append(
            _line(one, "log10_size", axis, "tokens' own size", legendgroup="size", line=dotted, **once)
        )
        for name in rows["theorem"].unique(maintain_order=True):
            part = rows.filter(theorem=name).sort("layer")
            if not part["met"].any():
                continue
            data.append(_bound(part, name, axis, number, panel))
            number += 1
        heavy = {"line": {"width": 2.6, "color": INK}, "marker": {"size": 7, "color": INK}, **MARKED}
        data.append(_line(one, "log10_measured", axis, "measured", legendgroup="measured", **heavy, **once))
        layout[f"xaxis{suffix(panel)}"] = layer_axis(int(one["layer"].to_numpy().max(initial=1)))
        layout[f"yaxis{suffix(panel)}"] = axis.axis("")
        layout["annotations"].append(heading(quantity(bounded).words, panel))
    return figure(
        data, layout, table.select(SAVED).to_dict(as_series=False),
        "Bounds and measurement by layer, of " + ", ".join(quantity(name).words for name in shown) + ".",
        panels=len(shown),
    )  # fmt: skip


def _line(rows: pl.DataFrame, column: str, axis: Powers, name: str, **look: Any) -> dict[str, Any]:
    logs, name = rows[column].fill_null(math.nan).to_list(), escaped(name)
    said = [
        f"{name}<br>layer {layer}: <b>{power(k)}</b>" for layer, k in zip(rows["layer"], logs, strict=True)
    ]
    return trace(rows["layer"].to_list(), axis.place(logs), said, name=name, **look)


def _bound(rows: pl.DataFrame, name: str, axis: Powers, number: int, panel: int) -> dict[str, Any]:
    upper = rows["kind"][0] == "upper"
    empty = rows["vacuous"].to_list()
    said = f"{name} {'≤' if upper else '≥'}"
    if rows.filter("met")["vacuous"].all():
        said = f"{name} (vacuous)"
    ink = colour(number % 6)
    look = {"width": 1.5, "dash": "solid" if upper else "dash", "color": ink}
    marks = {"size": 7, "color": ink, "symbol": [symbol(number, no) for no in empty]}
    line = _line(rows, "log10_bound", axis, said, panel=panel, line=look, marker=marks, **MARKED)
    vacuous = ["<br>vacuous: it says nothing" if no else "" for no in empty]
    return {**line, "text": [f"{text}{none}" for text, none in zip(line["text"], vacuous, strict=True)]}

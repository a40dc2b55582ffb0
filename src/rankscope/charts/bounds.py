"""What is proved next to what is measured: a panel for each quantity, every bound to where it holds."""

import math
from typing import Any

import polars as pl

from rankscope.charts.curves import layer_axis
from rankscope.charts.escaping import Figure, escaped
from rankscope.charts.powers import Powers
from rankscope.charts.style import FAINT, INK, colour, figure, heading, suffix, symbol
from rankscope.errors import TheoremError
from rankscope.figures import power
from rankscope.theory import Certificates
from rankscope.theory.views import drawn_quantities, quantity


def bounds(certificates: Certificates, sample: int = 0) -> Figure:
    """By layer, on an axis of powers: the measurement, the tokens' own size, and the bounds of each theorem
    whose hypotheses are met; hollow marks where a bound is vacuous."""
    table = certificates.table.filter(sample=sample)
    shown = drawn_quantities(table)
    if not shown:
        raise TheoremError("a figure needs a bound of residual, mu or diameter; ranks alone were certified")
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {"annotations": []}
    number = 0
    for panel, bounded in enumerate(shown):
        rows = table.filter(quantity=bounded)
        axis = Powers(_logs(rows, "log10_measured", "log10_size", "log10_bound"))
        place = {"xaxis": f"x{suffix(panel)}", "yaxis": f"y{suffix(panel)}", "type": "scatter"}
        one = rows.filter(theorem=rows["theorem"][0]).sort("layer")
        data.append({**place, **_line(one, "log10_size", axis, "tokens' own size", FAINT), "mode": "lines",
                     "line": {"dash": "dot", "width": 1.4, "color": FAINT}, "showlegend": panel == 0,
                     "legendgroup": "size"})  # fmt: skip
        for name in rows["theorem"].unique(maintain_order=True):
            part = rows.filter(theorem=name).sort("layer")
            if not part["met"].any():
                continue
            data.append({**place, **_bound(part, name, axis, number)})
            number += 1
        data.append({**place, **_line(one, "log10_measured", axis, "measured", INK), "mode": "lines+markers",
                     "line": {"width": 2.6, "color": INK}, "marker": {"size": 7, "color": INK},
                     "showlegend": panel == 0, "legendgroup": "measured"})  # fmt: skip
        layout[f"xaxis{suffix(panel)}"] = layer_axis(int(one["layer"].to_numpy().max(initial=1)))
        layout[f"yaxis{suffix(panel)}"] = axis.axis("")
        layout["annotations"].append(heading(quantity(bounded).words, panel))
    kept = ["theorem", "sample", "layer", "quantity", "kind", "met", "vacuous", "log10_bound",
            "log10_measured", "log10_size", "slack"]  # fmt: skip
    return figure(
        data, layout, table.select(kept).to_dict(as_series=False),
        "Bounds and measurement by layer, of " + ", ".join(quantity(name).words for name in shown) + ".",
        panels=len(shown),
    )  # fmt: skip


def _logs(rows: pl.DataFrame, *columns: str) -> list[float]:
    values = [value for column in columns for value in rows[column].to_list() if value is not None]
    return [value for value in values if math.isfinite(value)]


def _line(rows: pl.DataFrame, column: str, axis: Powers, name: str, ink: str) -> dict[str, Any]:
    logs = [math.nan if k is None else k for k in rows[column].to_list()]
    return {
        "x": rows["layer"].to_list(), "y": axis.place(logs), "name": escaped(name),
        "text": [f"{escaped(name)}<br>layer {layer}: <b>{power(k)}</b>"
                 for layer, k in zip(rows["layer"], logs, strict=True)],
        "hovertemplate": "%{text}<extra></extra>",
    }  # fmt: skip


def _bound(rows: pl.DataFrame, name: str, axis: Powers, number: int) -> dict[str, Any]:
    upper = rows["kind"][0] == "upper"
    empty = rows["vacuous"].to_list()
    said = f"{name} {'≤' if upper else '≥'}"
    if rows.filter("met")["vacuous"].all():
        said = f"{name} (vacuous)"
    line = _line(rows, "log10_bound", axis, said, colour(number % 6))
    text = [
        f"{each}{'<br>vacuous: it says nothing' if no else ''}"
        for each, no in zip(line["text"], empty, strict=True)
    ]
    return {
        **line, "text": text, "mode": "lines+markers",
        "line": {"width": 1.5, "dash": "solid" if upper else "dash", "color": colour(number % 6)},
        "marker": {"size": 7, "color": colour(number % 6), "symbol": [symbol(number, no) for no in empty]},
    }  # fmt: skip

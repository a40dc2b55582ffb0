"""Arithmetics side by side: how many digits a metric has lost, and how fast it loses them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rankscope.charts.curves import layer_axis
from rankscope.charts.escaping import Figure, escaped
from rankscope.charts.powers import Powers
from rankscope.charts.style import FAINT, colour, figure, heading, symbol
from rankscope.profiles.views import CurveView, digits_lost


def arithmetics(curves: Sequence[CurveView]) -> Figure:
    """One variant in several arithmetics. Left: digits lost, -log10, on a logarithmic axis. Right: the ratio
    of logs from layer to layer, which tends to 3 where each cubes the residual. Hollow where it is noise."""
    data: list[dict[str, Any]] = []
    axis = Powers(np.concatenate([np.log10(digits_lost(curve)[0]) for curve in curves]))
    columns: dict[str, list[Any]] = {
        name: [] for name in ("arithmetic", "layer", "digits", "ratio", "at_floor")
    }
    for number, curve in enumerate(curves):
        arithmetic, noise = curve.arithmetic, curve.noise
        lost, ratio = digits_lost(curve)
        places = axis.place(np.log10(lost))
        layers = list(range(len(lost)))
        marks = {"size": 8, "color": colour(number), "symbol": [symbol(number, bool(n)) for n in noise]}
        shared = {
            "type": "scatter", "mode": "lines+markers", "x": layers, "legendgroup": arithmetic,
            "line": {"width": 2, "color": colour(number)}, "hovertemplate": "%{text}<extra></extra>",
            "name": escaped(arithmetic), "marker": marks,
        }  # fmt: skip
        who = [f"{escaped(arithmetic)}, layer {layer}<br>" for layer in layers]
        digits = [f"{each}<b>{number:.6g}</b> digits" for each, number in zip(who, lost, strict=True)]
        ratios = [f"{each}ratio <b>{number:.4g}</b>" for each, number in zip(who, ratio, strict=True)]
        right = {"xaxis": "x2", "yaxis": "y2", "showlegend": False}
        data += [{**shared, "y": places, "text": digits}, {**shared, **right, "y": ratio, "text": ratios}]
        for name, values in zip(columns, ([arithmetic] * len(lost), layers, lost, ratio, noise), strict=True):
            columns[name] += np.asarray(values).tolist()
    last, variant = max(curve.depth for curve in curves), curves[0].variant
    three = {"type": "scatter", "mode": "lines", "x": [0, last], "y": [3, 3], "xaxis": "x2", "yaxis": "y2"}
    data.append({**three, "showlegend": False, "hoverinfo": "skip",
                 "line": {"width": 1, "dash": "dash", "color": FAINT}})  # fmt: skip
    titles = [heading(f"{variant}: digits lost", 0), heading("ratio of logs, layer to layer", 1)]
    return figure(
        data,
        {
            "xaxis": layer_axis(last), "xaxis2": layer_axis(last),
            "yaxis": axis.axis("−log₁₀"), "yaxis2": {"range": [0, 6]},
            "annotations": titles,
        },
        columns,
        f"Digits lost by layer of {variant} in {', '.join(each.arithmetic for each in curves)}, and the "
        "ratio of logs from layer to "
        "layer.",
        panels=2,
    )  # fmt: skip

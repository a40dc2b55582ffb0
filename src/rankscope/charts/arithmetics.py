"""Arithmetics side by side: how many digits a metric has lost, and how fast it loses them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rankscope.charts.curves import columns_of, layer_axis
from rankscope.charts.escaping import Figure, escaped
from rankscope.charts.powers import Powers
from rankscope.charts.style import FAINT, colour, figure, heading, symbol, trace
from rankscope.profiles.views import CurveView, digits_lost


def arithmetics(curves: Sequence[CurveView]) -> Figure:
    """One variant in several arithmetics. Left: digits lost, -log10, on a logarithmic axis. Right: the ratio
    of logs from layer to layer, which tends to 3 where each cubes the residual. Hollow where it is noise."""
    data: list[dict[str, Any]] = []
    axis = Powers(np.concatenate([np.log10(digits_lost(curve)[0]) for curve in curves]))
    rows: list[tuple[Any, ...]] = []
    for number, curve in enumerate(curves):
        lost, ratio = digits_lost(curve)
        layers, name = list(range(len(lost))), escaped(curve.arithmetic)
        look: dict[str, Any] = {
            "mode": "lines+markers", "name": name, "legendgroup": curve.arithmetic,
            "line": {"width": 2, "color": colour(number)},
            "marker": {"size": 8, "color": colour(number),
                       "symbol": [symbol(number, bool(each)) for each in curve.noise]},
        }  # fmt: skip
        digits = [f"{name}, layer {layer}<br><b>{each:.6g}</b> digits" for layer, each in enumerate(lost)]
        ratios = [f"{name}, layer {layer}<br>ratio <b>{each:.4g}</b>" for layer, each in enumerate(ratio)]
        data.append(trace(layers, axis.place(np.log10(lost)), digits, **look))
        data.append(trace(layers, ratio, ratios, panel=1, showlegend=False, **look))
        rows += zip([curve.arithmetic] * len(lost), layers, lost, ratio, curve.noise, strict=True)
    last, variant = max(curve.depth for curve in curves), curves[0].variant
    dashed = {"width": 1, "dash": "dash", "color": FAINT}
    data.append(trace([0, last], [3, 3], panel=1, showlegend=False, line=dashed))
    titles = [heading(f"{variant}: digits lost", 0), heading("ratio of logs, layer to layer", 1)]
    return figure(
        data,
        {
            "xaxis": layer_axis(last), "xaxis2": layer_axis(last),
            "yaxis": axis.axis("−log₁₀"), "yaxis2": {"range": [0, 6]},
            "annotations": titles,
        },
        columns_of(("arithmetic", "layer", "digits", "ratio", "at_floor"), rows),
        f"Digits lost by layer of {variant} in {', '.join(each.arithmetic for each in curves)}, and the "
        "ratio of logs from layer to layer.",
        panels=2,
    )  # fmt: skip

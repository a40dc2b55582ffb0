"""A metric by layer: a line for each variant, its range, its floor, and what is proved of it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from rankscope.charts.escaping import Figure, escaped
from rankscope.charts.powers import Powers
from rankscope.charts.style import FAINT, colour, dash, figure, symbol
from rankscope.figures import power
from rankscope.metrics import symbol_of
from rankscope.profiles.plot import looks
from rankscope.profiles.views import Band, CurveView, Layers, span
from rankscope.theory import Certificates
from rankscope.theory.views import EXACT

DRAWN = 200
"""Layers drawn at most; what is saved as CSV has all."""
QUANTITIES = {"relative_residual": "residual", "relative_mu": "mu"}
"""Metrics that are a share of the tokens' size, and what theorems call their numerator."""


def curves(
    shown: Sequence[CurveView],
    log: bool | None = None,
    certificates: Mapping[str, Certificates] | None = None,
) -> Figure:
    """A metric by layer. `log=None` takes an axis of powers where the values span over two decades.

    Marks are hollow where a value lies at its floor; floors are dotted. `certificates` by variant: the least
    upper and the greatest lower bound that say something are drawn beside their variant.
    """
    metric = shown[0].metric
    log = span(shown) > 2 if log is None else log
    bounds = _bounds(metric, certificates or {}) if log else {}
    logs = [side for each in shown for side in _sides(*each.drawn(True))]
    logs += [each.floor for each in shown] if log else []
    axis = Powers(np.concatenate([*logs, *(part for two in bounds.values() for part in two.values())]))
    data: list[dict[str, Any]] = []
    for number, each in zip(looks(shown), shown, strict=True):
        data += _traces(each, log, number, axis, len(shown))
        if each.variant in bounds and each.arithmetic == "deviation":
            data += [_bound(each, kind, curve, number, axis) for kind, curve in bounds[each.variant].items()]
    if log:
        data += _floors(shown, axis)
    name = written(metric)
    y = axis.axis(name) if log else {
        "title": {"text": name}, "rangemode": "tozero", "exponentformat": "power",
    }  # fmt: skip
    return figure(
        data,
        {"xaxis": layer_axis(max(each.depth for each in shown)), "yaxis": y},
        _table(shown),
        f"{metric} by layer, {'logarithmic' if log else 'linear'}: "
        + "; ".join(f"{each.label} ends at {power(float(each.log10[-1]))}" for each in shown)
        + ".",
    )


def written(metric: str) -> str:
    """The symbol of a metric as plotly sets it."""
    return escaped(symbol_of(metric)).replace("₁,∞", "<sub>1,∞</sub>").replace("_F", "<sub>F</sub>")


def layer_axis(last: int, title: str = "layer") -> dict[str, Any]:
    """Whole layers, some dozen labels at most."""
    return {"title": {"text": title}, "dtick": max(1, -(-last // 12)), "tick0": 0, "zeroline": False,
            "range": [-0.03 * last - 0.15, 1.03 * last + 0.15]}  # fmt: skip


def _sides(centre: Layers, bands: Sequence[Band]) -> list[Layers]:
    return [centre, *(side for band in bands for side in band)]


def _traces(curve: CurveView, log: bool, number: int, axis: Powers, among: int) -> list[dict[str, Any]]:
    """Bands, the line, and its tail into the noise; one entry of the legend hides all of them."""
    layers = np.unique(np.linspace(0, curve.depth, min(curve.depth + 1, DRAWN)).round().astype(int))
    centre, bands = curve.drawn(log)
    centre, noise = centre[layers], curve.noise[layers]

    def placed(values: np.ndarray) -> list[float | None]:
        if log:
            return axis.place(values)
        return [float(v) if np.isfinite(v) else None for v in values]

    shared = {"legendgroup": f"line {number}", "x": layers, "type": "scatter", "mode": "lines"}
    data: list[dict[str, Any]] = []
    for low, high in ((low[layers], high[layers]) for low, high in bands):
        there = np.isfinite(low) & np.isfinite(high)
        around = {
            **shared, "hoverinfo": "skip", "showlegend": False, "line": {"width": 0, "color": colour(number)}
        }  # fmt: skip
        both = [*placed(low[there]), *reversed(placed(high[there]))]
        x = np.concatenate([layers[there], layers[there][::-1]])
        strength = 0.16 * min(1.0, 4 / among)
        data.append({**around, "x": x, "y": both, "fill": "toself", "opacity": strength,
                     "fillcolor": colour(number)})  # fmt: skip
    said = [
        f"{escaped(curve.label)}<br>layer {layer}: <b>{power(float(curve.log10[layer]))}</b>"
        + (f"<br>at {escaped(curve.arithmetic)}'s floor: rounding noise" if curve.noise[layer] else "")
        for layer in layers
    ]
    tail = noise | (np.roll(noise, -1) & (layers < layers[-1]))
    main = np.where(noise, np.nan, centre)
    silent = {**shared, "hoverinfo": "skip", "showlegend": False}
    for part, width, style in ((np.where(tail, centre, np.nan), 1, "dot"), (main, 2, dash(number))):
        look = {"width": width, "dash": style, "color": colour(number)}
        data.append({**silent, "y": placed(part), "line": look})
    data.append({
        **shared, "y": placed(centre), "mode": "markers", "name": escaped(curve.label), "text": said,
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"size": 8, "color": colour(number), "line": {"width": 1.5, "color": colour(number)},
                   "symbol": [symbol(number, bool(each)) for each in noise]},
    })  # fmt: skip
    return data


def _floors(lines: Sequence[CurveView], axis: Powers) -> list[dict[str, Any]]:
    """Each floor once: ratios have one per arithmetic, absolute values one per variant."""
    data, drawn = [], set()
    named: set[str] = set()
    for line in lines:
        key = (line.arithmetic, line.floor.round(6).tobytes())
        if not np.isfinite(line.floor).any() or key in drawn:
            continue
        drawn.add(key)
        name = escaped(f"floor of {line.arithmetic}")
        data.append({
            "type": "scatter", "mode": "lines", "x": np.arange(len(line.floor)), "y": axis.place(line.floor),
            "name": name, "legendgroup": name, "showlegend": name not in named,
            "line": {"width": 1.4, "dash": "dot", "color": FAINT},
            "text": [f"{name}: {power(float(k))}" for k in line.floor],
            "hovertemplate": "%{text}<extra></extra>",
        })  # fmt: skip
        named.add(name)
    return data


def _bounds(metric: str, certificates: Mapping[str, Certificates]) -> dict[str, dict[str, np.ndarray]]:
    """By variant and kind: log10 of the best bound of the metric at each layer, NaN where there is none. Of
    several samples the one that is worst off: a bound holds for all of them."""
    if metric not in QUANTITIES:
        return {}
    found: dict[str, dict[str, np.ndarray]] = {}
    for variant, each in certificates.items():
        said = each.guarantees().filter(pl.col("quantity") == QUANTITIES[metric], pl.col("theorem") != EXACT)
        depth = int(each.table["layer"].to_numpy().max(initial=0))
        samples = each.table["sample"].n_unique()
        share = pl.col("log10_bound") - pl.col("log10_size")
        for kind, best, worst in (("upper", pl.min, pl.max), ("lower", pl.max, pl.min)):
            rows = (
                said.filter(kind=kind).with_columns(share.alias("share")).filter(pl.col("share").is_finite())
            )
            by_sample = rows.group_by("layer", "sample").agg(best("share"))
            by_layer = (
                by_sample.group_by("layer").agg(worst("share"), pl.len()).filter(pl.col("len") == samples)
            )
            curve = np.full(depth + 1, np.nan)
            curve[by_layer["layer"].to_numpy()] = by_layer["share"].to_numpy()
            if np.isfinite(curve).any():
                found.setdefault(variant, {})[kind] = curve
    return found


def _bound(line: CurveView, kind: str, curve: np.ndarray, number: int, axis: Powers) -> dict[str, Any]:
    side, mark = ("at most", "arrow-down-open") if kind == "upper" else ("at least", "arrow-up-open")
    name = escaped(f"{line.label}: proved {side}")
    return {
        "type": "scatter", "mode": "lines+markers", "x": np.arange(len(curve)), "y": axis.place(curve),
        "name": name, "line": {"width": 1, "dash": "2px,3px", "color": colour(number)},
        "marker": {"symbol": mark, "size": 9, "color": colour(number)},
        "text": [f"{name} {power(float(k))}<br>at layer {layer}" for layer, k in enumerate(curve)],
        "hovertemplate": "%{text}<extra></extra>",
    }  # fmt: skip


def _table(shown: Sequence[CurveView]) -> dict[str, list[Any]]:
    """What the CSV holds: log10 at every layer, which does not underflow, the value, and the widest band."""
    names = ("variant", "arithmetic", "metric", "layer", "log10", "log10_low", "log10_high", "value", "low",
             "high", "at_floor", "log10_floor")  # fmt: skip
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for each in shown:
        number = each.depth + 1
        same = [[part] * number for part in (each.variant, each.arithmetic, each.metric)]
        numbers = [
            side
            for centre, bands in ((each.log10, each.log10_bands), (each.value, each.value_bands))
            for side in _sides(centre, (bands or [(centre, centre)])[:1])
        ]
        parts = (*same, range(number), *numbers, each.noise, each.floor)
        for name, part in zip(names, parts, strict=True):
            columns[name] += part.tolist() if isinstance(part, np.ndarray) else list(part)
    return columns

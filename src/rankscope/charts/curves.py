"""A metric by layer: a line for each variant, its range, its floor, and what is proved of it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from rankscope.charts.escaping import Figure, escaped
from rankscope.charts.powers import Powers
from rankscope.charts.style import FAINT, colour, dash, figure, in_order, scale, symbol, trace
from rankscope.figures.style import LISTED, NUMBER, in_sequence
from rankscope.figures.text import power
from rankscope.metrics import symbol_of
from rankscope.profiles.views import Band, CurveView, Layers, looks, span
from rankscope.theory import Certificates
from rankscope.theory.views import EXACT

DRAWN = 200
"""Layers drawn at most; what is saved as CSV has all."""
QUANTITIES = {"relative_residual": "residual", "relative_mu": "mu"}
"""Metrics that are a share of the tokens' size, and what theorems call their numerator."""
SAVED = ("variant", "arithmetic", "metric", "layer", "log10", "log10_low", "log10_high", "value", "low",
         "high", "at_floor", "log10_floor")  # fmt: skip
"""Columns of the CSV."""


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
    places = order_of(shown)
    for place, (number, each) in enumerate(zip(looks(shown), shown, strict=True)):
        ink = in_order(places[place] / (len(shown) - 1)) if places else colour(number)
        data += _traces(each, log, number, axis, len(shown), ink)
        if each.variant in bounds and each.arithmetic == "deviation":
            data += [_bound(each, kind, curve, ink, axis) for kind, curve in bounds[each.variant].items()]
    if places and len(shown) > LISTED:
        data = [{**each, "showlegend": False} for each in data] + [_scale(shown, places)]
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


def order_of(shown: Sequence[CurveView]) -> list[int] | None:
    """The place of each among lines that are a sequence, as steps of a training are; None of others."""
    numbers = in_sequence([each.label for each in shown])
    return None if numbers is None else [sorted(numbers).index(each) for each in numbers]


def _scale(shown: Sequence[CurveView], places: Sequence[int]) -> dict[str, Any]:
    names = [name for _, name in sorted(zip(places, (each.label for each in shown), strict=True))]
    columns = zip(*map(NUMBER.findall, names), strict=True)
    varied = next(column for column in columns if len(set(column)) > 1)
    title = names[0].replace(varied[0], "", 1).strip(" -_:=") or "line"
    return scale(title, varied)


def written(metric: str) -> str:
    """The symbol of a metric as plotly sets it."""
    return escaped(symbol_of(metric)).replace("₁,∞", "<sub>1,∞</sub>").replace("_F", "<sub>F</sub>")


def layer_axis(last: int, title: str = "layer") -> dict[str, Any]:
    """Whole layers, some dozen labels at most."""
    return {"title": {"text": title}, "dtick": max(1, -(-last // 12)), "tick0": 0, "zeroline": False,
            "range": [-0.03 * last - 0.15, 1.03 * last + 0.15]}  # fmt: skip


def _sides(centre: Layers, bands: Sequence[Band]) -> list[Layers]:
    return [centre, *(side for band in bands for side in band)]


def _traces(
    curve: CurveView, log: bool, number: int, axis: Powers, among: int, ink: str
) -> list[dict[str, Any]]:
    """Bands, the line, and its tail into the noise; one entry of the legend hides all of them."""
    layers = np.unique(np.linspace(0, curve.depth, min(curve.depth + 1, DRAWN)).round().astype(int))
    centre, bands = curve.drawn(log)
    centre, noise = centre[layers], curve.noise[layers]

    def placed(values: np.ndarray) -> list[float | None]:
        if log:
            return axis.place(values)
        return [float(v) if np.isfinite(v) else None for v in values]

    group: dict[str, Any] = {"legendgroup": f"line {number}"}
    silent: dict[str, Any] = {**group, "showlegend": False}
    data: list[dict[str, Any]] = []
    for low, high in ((low[layers], high[layers]) for low, high in bands):
        there = np.isfinite(low) & np.isfinite(high)
        both = [*placed(low[there]), *reversed(placed(high[there]))]
        x = np.concatenate([layers[there], layers[there][::-1]])
        filled: dict[str, Any] = {"fill": "toself", "opacity": 0.16 * min(1.0, 4 / among), "fillcolor": ink}
        data.append(trace(x, both, line={"width": 0, "color": ink}, **filled, **silent))
    said = [
        f"{escaped(curve.label)}<br>layer {layer}: <b>{power(float(curve.log10[layer]))}</b>"
        + (f"<br>at {escaped(curve.arithmetic)}'s floor: rounding noise" if curve.noise[layer] else "")
        for layer in layers
    ]
    tail = noise | (np.roll(noise, -1) & (layers < layers[-1]))
    main = np.where(noise, np.nan, centre)
    for part, width, style in ((np.where(tail, centre, np.nan), 1, "dot"), (main, 2, dash(number))):
        look = {"width": width, "dash": style, "color": ink}
        data.append(trace(layers, placed(part), line=look, **silent))
    symbols = [symbol(number, bool(each)) for each in noise]
    marker = {"size": 8, "color": ink, "line": {"width": 1.5, "color": ink}, "symbol": symbols}
    marks: dict[str, Any] = {"mode": "markers", "name": escaped(curve.label), "marker": marker}
    return [*data, trace(layers, placed(centre), said, **marks, **group)]


def _floors(lines: Sequence[CurveView], axis: Powers) -> list[dict[str, Any]]:
    """Each floor once: ratios have one per arithmetic, absolute values one per variant."""
    data, drawn = [], set[tuple[str, bytes]]()
    for line in lines:
        key = (line.arithmetic, line.floor.round(6).tobytes())
        if not np.isfinite(line.floor).any() or key in drawn:
            continue
        name = escaped(f"floor of {line.arithmetic}")
        said = [f"{name}: {power(float(k))}" for k in line.floor]
        known: dict[str, Any] = {
            "name": name,
            "legendgroup": name,
            "showlegend": line.arithmetic not in dict(drawn),
        }
        look = {"width": 1.4, "dash": "dot", "color": FAINT}
        data.append(trace(np.arange(len(line.floor)), axis.place(line.floor), said, line=look, **known))
        drawn.add(key)
    return data


def _bounds(metric: str, certificates: Mapping[str, Certificates]) -> dict[str, dict[str, np.ndarray]]:
    """By variant and kind: log10 of the best bound of the metric at each layer, NaN where there is none. Of
    several samples the one that is worst off: a bound holds for all of them."""
    if metric not in QUANTITIES:
        return {}
    found: dict[str, dict[str, np.ndarray]] = {}
    for variant, each in certificates.items():
        share = (pl.col("log10_bound") - pl.col("log10_size")).alias("share")
        proved = each.guarantees().filter(pl.col("theorem") != EXACT, quantity=QUANTITIES[metric])
        proved = proved.with_columns(share).filter(pl.col("share").is_finite())
        depth = int(each.table["layer"].to_numpy().max(initial=0))
        samples = each.table["sample"].n_unique()
        for kind, best, worst in (("upper", pl.min, pl.max), ("lower", pl.max, pl.min)):
            by_sample = proved.filter(kind=kind).group_by("layer", "sample").agg(best("share"))
            by_layer = by_sample.group_by("layer").agg(worst("share"), pl.len()).filter(len=samples)
            curve = np.full(depth + 1, np.nan)
            curve[by_layer["layer"].to_numpy()] = by_layer["share"].to_numpy()
            if np.isfinite(curve).any():
                found.setdefault(variant, {})[kind] = curve
    return found


def _bound(line: CurveView, kind: str, curve: np.ndarray, ink: str, axis: Powers) -> dict[str, Any]:
    side, mark = ("at most", "arrow-down-open") if kind == "upper" else ("at least", "arrow-up-open")
    name = escaped(f"{line.label}: proved {side}")
    said = [f"{name} {power(float(k))}<br>at layer {layer}" for layer, k in enumerate(curve)]
    look: dict[str, Any] = {
        "line": {"width": 1, "dash": "2px,3px", "color": ink},
        "marker": {"symbol": mark, "size": 9, "color": ink},
    }
    return trace(np.arange(len(curve)), axis.place(curve), said, mode="lines+markers", name=name, **look)


def _table(shown: Sequence[CurveView]) -> dict[str, list[Any]]:
    """What the CSV holds: log10 at every layer, which does not underflow, the value, and the widest band."""
    rows: list[tuple[Any, ...]] = []
    for each in shown:
        sides = [
            side
            for centre, bands in ((each.log10, each.log10_bands), (each.value, each.value_bands))
            for side in _sides(centre, (bands or [(centre, centre)])[:1])
        ]
        numbers = zip(*sides, each.noise, each.floor, strict=True)
        same = (each.variant, each.arithmetic, each.metric)
        rows += [(*same, layer, *parts) for layer, parts in enumerate(numbers)]
    return columns_of(SAVED, rows)


def columns_of(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> dict[str, list[Any]]:
    """Rows of numbers as the table of a figure has them."""
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))

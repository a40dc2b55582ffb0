"""A metric by layer: a line for each variant, its range, its floor, and what is proved of it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from rankscope.charts.powers import Powers
from rankscope.charts.safe import Figure, escaped
from rankscope.charts.style import FAINT, colour, dash, figure, symbol
from rankscope.figures import power
from rankscope.metrics import symbol_of
from rankscope.profiles import Profile, Summary
from rankscope.profiles.lines import Line, lines_of, looks
from rankscope.theory import Certificates

DRAWN = 200
"""Layers drawn at most; what is saved as CSV has all."""
QUANTITIES = {"relative_residual": "residual", "relative_mu": "mu"}
"""Metrics that are a share of the tokens' size, and what theorems call their numerator."""


def curves(
    profile: Profile | Summary,
    metric: str,
    log: bool | None = None,
    certificates: Mapping[str, Certificates] | None = None,
) -> Figure:
    """The metric by layer. `log=None` takes an axis of powers where the values span over two decades.

    Marks are hollow where a value lies at its floor; floors are dotted. `certificates` by variant: the least
    upper and the greatest lower bound that say something are drawn beside their variant.
    """
    logs = lines_of(profile, metric, log=True)
    known = _known(logs)
    log = bool(len(known) and np.ptp(known) > 2) if log is None else log
    lines = logs if log else lines_of(profile, metric, log=False)
    bounds = _bounds(metric, certificates or {}) if log else {}
    floors = [line.floor[np.isfinite(line.floor)] for line in logs] if log else []
    axis = Powers(
        np.concatenate([known, *floors, *(part for two in bounds.values() for part in two.values())])
    )
    data: list[dict[str, Any]] = []
    for number, line, of_log in zip(looks(profile, metric), lines, logs, strict=True):
        data += _traces(line, of_log.centre, number, axis if log else None, len(lines))
        if line.variant in bounds and line.arithmetic == "deviation":
            data += [_bound(line, kind, curve, number, axis) for kind, curve in bounds[line.variant].items()]
    if log:
        data += _floors(logs, axis)
    name = written(metric)
    y = axis.axis(name) if log else {
        "title": {"text": name}, "rangemode": "tozero", "exponentformat": "power",
    }  # fmt: skip
    return figure(
        data,
        {"xaxis": layer_axis(max(len(line.centre) for line in lines) - 1), "yaxis": y},
        _table(logs, lines_of(profile, metric, log=False) if log else lines, metric),
        f"{metric} by layer, {'logarithmic' if log else 'linear'}: "
        + "; ".join(f"{line.label} ends at {power(float(line.centre[-1]))}" for line in logs)
        + ".",
    )


def written(metric: str) -> str:
    """The symbol of a metric as plotly sets it."""
    return escaped(symbol_of(metric)).replace("₁,∞", "<sub>1,∞</sub>").replace("_F", "<sub>F</sub>")


def layer_axis(last: int, title: str = "layer") -> dict[str, Any]:
    """Whole layers, some dozen labels at most."""
    return {"title": {"text": title}, "dtick": max(1, -(-last // 12)), "tick0": 0, "zeroline": False,
            "range": [-0.03 * last - 0.15, 1.03 * last + 0.15]}  # fmt: skip


def _known(lines: list[Line]) -> np.ndarray:
    every = [np.ravel([line.centre, *(side for band in line.bands for side in band)]) for line in lines]
    found = np.concatenate([np.zeros(0), *every])
    return found[np.isfinite(found)]


def _traces(
    line: Line, logs: np.ndarray, number: int, axis: Powers | None, among: int
) -> list[dict[str, Any]]:
    """Bands, the line, and its tail into the noise; one entry of the legend hides all of them."""
    layers = np.arange(len(line.centre))
    shown = _thinned(line)
    line, logs, layers = _at(line, shown), logs[shown], layers[shown]

    def placed(values: np.ndarray) -> list[float | None]:
        if axis is not None:
            return axis.place(values)
        return [float(v) if np.isfinite(v) else None for v in values]

    shared = {"legendgroup": f"line {number}", "x": layers, "type": "scatter", "mode": "lines"}
    data: list[dict[str, Any]] = []
    for low, high in line.bands:
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
        f"{escaped(line.label)}<br>layer {layer}: <b>{power(float(k))}</b>"
        + (f"<br>at {escaped(line.arithmetic)}'s floor: rounding noise" if noise else "")
        for layer, k, noise in zip(layers, logs, line.noise, strict=True)
    ]
    tail = line.noise | (np.roll(line.noise, -1) & (layers < layers[-1]))
    main = np.where(line.noise, np.nan, line.centre)
    silent = {**shared, "hoverinfo": "skip", "showlegend": False}
    for part, width, style in ((np.where(tail, line.centre, np.nan), 1, "dot"), (main, 2, dash(number))):
        look = {"width": width, "dash": style, "color": colour(number)}
        data.append({**silent, "y": placed(part), "line": look})
    data.append({
        **shared, "y": placed(line.centre), "mode": "markers", "name": escaped(line.label), "text": said,
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"size": 8, "color": colour(number), "line": {"width": 1.5, "color": colour(number)},
                   "symbol": [symbol(number, bool(noise)) for noise in line.noise]},
    })  # fmt: skip
    return data


def _thinned(line: Line) -> np.ndarray:
    """The layers that are drawn: all, or of very many some, evenly."""
    return np.unique(np.linspace(0, len(line.centre) - 1, min(len(line.centre), DRAWN)).round().astype(int))


def _at(line: Line, layers: np.ndarray) -> Line:
    bands = [(low[layers], high[layers]) for low, high in line.bands]
    return replace(line, centre=line.centre[layers], bands=bands, noise=line.noise[layers])


def _floors(lines: list[Line], axis: Powers) -> list[dict[str, Any]]:
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
        said = each.guarantees().filter(
            pl.col("quantity") == QUANTITIES[metric], pl.col("theorem") != "exact-factors"
        )
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


def _bound(line: Line, kind: str, curve: np.ndarray, number: int, axis: Powers) -> dict[str, Any]:
    side, mark = ("at most", "arrow-down-open") if kind == "upper" else ("at least", "arrow-up-open")
    name = escaped(f"{line.label}: proved {side}")
    return {
        "type": "scatter", "mode": "lines+markers", "x": np.arange(len(curve)), "y": axis.place(curve),
        "name": name, "line": {"width": 1, "dash": "2px,3px", "color": colour(number)},
        "marker": {"symbol": mark, "size": 9, "color": colour(number)},
        "text": [f"{name} {power(float(k))}<br>at layer {layer}" for layer, k in enumerate(curve)],
        "hovertemplate": "%{text}<extra></extra>",
    }  # fmt: skip


def _table(logs: list[Line], values: list[Line], metric: str) -> dict[str, list[Any]]:
    """What the CSV holds: log10 at every layer, which does not underflow, the value, and the widest band."""
    names = ("variant", "arithmetic", "metric", "layer", "log10", "log10_low", "log10_high", "value", "low",
             "high", "at_floor", "log10_floor")  # fmt: skip
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for line, value in zip(logs, values, strict=True):
        number = len(line.centre)
        same = [[part] * number for part in (line.variant, line.arithmetic, metric)]
        drawn = [
            side for each in (line, value) for side in (each.centre, *(each.bands or [(each.centre,) * 2])[0])
        ]
        parts = (*same, range(number), *drawn, line.noise, line.floor)
        for name, part in zip(names, parts, strict=True):
            columns[name] += part.tolist() if isinstance(part, np.ndarray) else list(part)
    return columns

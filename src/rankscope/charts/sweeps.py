"""A sweep: a metric by layer in small multiples, and at the last layer by the levels of each factor."""

from typing import Any

import numpy as np

from rankscope.charts.curves import columns_of, layer_axis, written
from rankscope.charts.escaping import Figure, escaped
from rankscope.charts.powers import Powers
from rankscope.charts.style import colour, evenly, figure, heading, in_order, suffix, trace
from rankscope.engine.views import Levels, SweepView, described
from rankscope.figures.text import power

PANELS, POINTS = 6, 2000
"""Panels of a figure, and cells that are drawn as points, at most."""
HIGH = 330
"""Pixels of a row of panels."""


def sweep_curves(view: SweepView, ink: str | None, panel: str | None) -> Figure:
    """A panel for each level of a factor, a line for each of another: the median of cells, their range."""
    inks, places = view.levels(ink), view.levels(panel)
    shown = evenly(range(len(places.labels)), PANELS)
    curves = [each for each in view.curves(ink, panel) if each.panel in shown]
    axis = _axis(view)
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {"annotations": []}
    named = set[int]()
    for curve in sorted(curves, key=lambda each: each.colour):
        place, layers = shown.index(curve.panel), np.arange(len(curve.centre))
        look, name = _ink(inks, curve.colour), _called(inks, curve.colour)
        there = np.isfinite(curve.low) & np.isfinite(curve.high)
        group = {"legendgroup": f"level {curve.colour}"}
        both = [*_placed(curve.low[there], axis), *reversed(_placed(curve.high[there], axis))]
        data.append(trace(
            np.concatenate([layers[there], layers[there][::-1]]), both, None, place, fill="toself",
            opacity=0.16 * min(1.0, 3 / len(inks.labels)), fillcolor=look, line={"width": 0, "color": look},
            showlegend=False, **group,
        ))  # fmt: skip
        said = [
            f"{_called(places, curve.panel)} {name}<br>layer {layer}: <b>{_number(value, view)}</b>, median "
            f"of {curve.cells} cells"
            for layer, value in enumerate(curve.centre)
        ]
        data.append(trace(
            layers, _placed(curve.centre, axis), said, place, mode="lines", name=name or "all cells",
            line={"width": 2, "color": look}, showlegend=curve.colour not in named and bool(name), **group,
        ))  # fmt: skip
        named.add(curve.colour)
    for place, level in enumerate(shown):
        depth = max((len(each.centre) - 1 for each in curves if each.panel == level), default=1)
        last = place >= len(shown) - 2  # of a row below, the heading would stand on the title of this one
        layout[f"xaxis{suffix(place)}"] = layer_axis(depth, "layer" if last else "")
        layout[f"yaxis{suffix(place)}"] = _y(view, axis, place % 2 == 0)
        layout["annotations"].append(heading(_called(places, level) or "all cells", place))
    rows = [
        (places.labels[each.panel], inks.labels[each.colour], layer, *numbers, each.cells)
        for each in curves
        for layer, numbers in enumerate(zip(each.centre, each.low, each.high, strict=True))
    ]
    columns = (panel or "panel", ink or "line", "layer", f"{view.column}_median", "low", "high", "cells")
    return figure(
        data, {**layout, "height": HIGH}, columns_of(columns, rows),
        f"{view.metric} by layer, in {len(shown)} panels by {panel or 'nothing'}, a line for each "
        f"{ink or 'sweep'}.",
        panels=len(shown), columns=2 if len(shown) > 1 else 1,
    )  # fmt: skip


def sweep_levels(view: SweepView) -> Figure:
    """A panel for each factor: every cell at its last layer above its level, and the median of each."""
    factors = list(view.effects)[:PANELS]
    axis = _axis(view)
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {"annotations": [], "showlegend": False}
    some = evenly(range(len(view.cells)), POINTS)
    said = [f"cell {view.cells['cell'][row]}<br>{escaped(described(view, row))}" for row in some]
    said = [f"{each}<br><b>{_number(view.ends[row], view)}</b>" for each, row in zip(said, some, strict=True)]
    aside = 0.5 * (np.arange(len(view.cells)) * 0.618034 % 1 - 0.5)
    for place, factor in enumerate(factors):
        levels = view.levels(factor)
        at, deep = _places(levels)
        apart = float(np.diff(at).min(initial=at[-1] - at[0] or 1.0))
        marker = {"size": 5, "color": colour(0), "opacity": 0.4}
        data.append(trace(
            (at[levels.of] + apart * aside)[some], _placed(view.ends[some], axis), said, place,
            mode="markers", marker=marker,
        ))  # fmt: skip
        middles = np.array([_median(view.ends[levels.of == level]) for level in range(len(levels.labels))])
        words = [
            f"{escaped(factor)} {escaped(name)}: median <b>{_number(value, view)}</b>"
            for name, value in zip(levels.labels, middles, strict=True)
        ]
        data.append(trace(
            at, _placed(middles, axis), words, place, mode="markers",
            marker={"symbol": "line-ew-open", "size": 14 if deep else 26, "color": "@ink",
                    "line": {"width": 3}},
        ))  # fmt: skip
        layout[f"xaxis{suffix(place)}"] = layer_axis(int(at[-1]), "") if deep else {
            "tickvals": at, "ticktext": [escaped(name) for name in levels.labels], "zeroline": False,
            "showgrid": False, "automargin": True, "range": [-0.6, at[-1] + 0.6],
        }  # fmt: skip
        layout[f"yaxis{suffix(place)}"] = _y(view, axis, place % 2 == 0)
        layout["annotations"].append(heading(f"{factor}: {view.effects[factor]:.0%}", place))
    rows = [tuple(view.cells[name][row] for name in ("cell", *factors, "value", "log10")) for row in some]
    return figure(
        data, {**layout, "height": HIGH}, columns_of(("cell", *factors, "value", "log10"), rows),
        f"{view.metric} at the last layer of each cell, by {', '.join(factors)}.",
        panels=max(1, len(factors)), columns=2 if len(factors) > 1 else 1,
    )  # fmt: skip


def _places(levels: Levels) -> tuple[np.ndarray, bool]:
    """Where levels stand: side by side. Those of a depth, and then it is true, stand at their numbers: twice
    the depth is twice as far."""
    if levels.factor == "depth" and len(levels.labels) > 1 and all(map(str.isdecimal, levels.labels)):
        return np.array(levels.labels, float), True
    return np.arange(len(levels.labels), dtype=float), False


def _axis(view: SweepView) -> Powers | None:
    return Powers(view.layers["log10"].to_list()) if view.log else None


def _placed(values: np.ndarray, axis: Powers | None) -> list[float | None]:
    if axis is not None:
        return axis.place(values)
    return [float(each) if np.isfinite(each) else None for each in values]


def _y(view: SweepView, axis: Powers | None, named: bool) -> dict[str, Any]:
    title = written(view.metric) if named else ""
    if axis is not None:
        return axis.axis(title)
    known = view.layers["value"].to_numpy()
    known = known[np.isfinite(known)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    room = 0.05 * (high - low) or 0.5
    return {"title": {"text": title}, "range": [low - room, high + room], "zeroline": False}


def _number(value: float, view: SweepView) -> str:
    return power(float(value)) if view.log else f"{value:.4g}"


def _ink(levels: Levels, number: int) -> str:
    return in_order(number / max(1, len(levels.labels) - 1)) if levels.ordered else colour(number)


def _called(levels: Levels, number: int) -> str:
    return escaped(f"{levels.factor} {levels.labels[number]}") if levels.factor else ""


def _median(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else float("nan")

"""A training run: a metric by layer and step as a map, numbers over steps as lines, alarms marked on both."""

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from rankscope.charts.curves import written
from rankscope.charts.escaping import Figure, escaped
from rankscope.charts.powers import Powers
from rankscope.charts.style import (
    FAINT,
    SEQUENTIAL,
    colour,
    evenly,
    figure,
    heading,
    in_order,
    scale,
    suffix,
    trace,
)
from rankscope.figures.style import LISTED
from rankscope.runs.training import NAMES, Grid, TrainingRun, decades, title_of

LOOKS, LINES, FEW, MARKS = 300, 9, 6, 40
"""Looks that are drawn, layers that have a line (of one panel, of several), and steps with alarms that are
marked, at most."""
NOISE = ", at its floor: rounding noise"


def layer_map(training: TrainingRun, metric: str) -> Figure:
    """Layer by step, the value as a colour: its logarithm where values span over two decades."""
    grid = _drawn(training, training.grid(metric))
    axis, log = _axis(grid.value)
    low, high = (axis.low, axis.high) if log else _ends(grid.value)
    shown = grid.value
    if log:
        with np.errstate(divide="ignore"):
            shown = np.log10(grid.value)
        shown[shown == -np.inf] = axis.low  # nothing is left: as dark as can be, and its number says 0
    bar: dict[str, Any] = {
        "thickness": 10,
        "outlinewidth": 0,
        "title": {"text": _unit(metric), "side": "right"},
    }
    if log:
        ticks = axis.axis("")
        bar |= {"tickvals": ticks["tickvals"], "ticktext": ticks["ticktext"]}
        shown = np.array([axis.place(row) for row in shown], dtype=float)
        low, high = axis.place([low, high])  # type: ignore[assignment]
    cells = {
        "type": "heatmap", "x": grid.steps, "y": grid.layers, "z": shown, "colorscale": SEQUENTIAL,
        "zmin": low, "zmax": high, "colorbar": bar, "text": _numbers(grid),
        "hovertemplate": "step %{x}, layer %{y}<br><b>%{text}</b><extra></extra>",
    }  # fmt: skip
    last = grid.layers[-1] if grid.layers else 0
    layout = {
        "height": max(340, min(640, 130 + 24 * len(grid.layers))),
        "xaxis": {**_steps(), "showgrid": False},
        "yaxis": {
            "title": {"text": "layer"},
            "dtick": max(1, -(-last // 12)),
            "showgrid": False,
            "zeroline": False,
        },
        "showlegend": False,
        **_marked(training, 1),
    }
    return _kept(figure(
        [cells, *_rings(training, grid)], layout, _table(grid),
        f"{title_of(metric)} by layer and step: {len(grid.layers)} layers, {len(grid.steps)} looks up to "
        f"step {_last(training)}; {_span(grid.value)}.",
    ), metric)  # fmt: skip


def layer_curves(training: TrainingRun, metrics: Sequence[str]) -> Figure:
    """A panel for each of the metrics, a line for each layer, from dark to light with depth."""
    grids = [_drawn(training, training.grid(metric)) for metric in metrics]
    several = len(grids) > 1
    shown = evenly(sorted({layer for grid in grids for layer in grid.layers}), FEW if several else LINES)
    data: list[dict[str, Any]] = []
    layout = _marked(training, len(grids), several)
    for panel, grid in enumerate(grids):
        axis, log = _axis(grid.value)
        numbers = _numbers(grid)
        for place, layer in enumerate(shown):
            if layer not in grid.layers:
                continue
            row = grid.layers.index(layer)
            ink = in_order(place / max(1, len(shown) - 1))
            said = f"{escaped(title_of(grid.metric))}<br>step %{{x}}, layer {layer}: <b>%{{text}}</b>"
            data.append(trace(
                grid.steps, _placed(grid.value[row], axis if log else None), numbers[row], panel, meta=layer,
                name=f"layer {layer}", legendgroup=f"layer {layer}", hovertemplate=f"{said}<extra></extra>",
                showlegend=layer not in {each["meta"] for each in data}, **_line(ink, len(grid.steps)),
            ))  # fmt: skip
        layout |= _axes(panel, axis, log, "" if several else _unit(grid.metric), grid.value)
    if several:
        layout["annotations"] = [
            *layout.get("annotations", []),
            *map(heading, map(title_of, metrics), range(len(grids))),
        ]
    tables = [pl.DataFrame(_table(grid)) for grid in grids]
    return _kept(figure(
        data, layout, pl.concat(tables).to_dict(as_series=False) if tables else {},
        "; ".join(f"{title_of(grid.metric)} over the steps, {_span(grid.value)}" for grid in grids) + ".",
        panels=len(grids), columns=min(2, len(grids)),
    ), ",".join(metrics))  # fmt: skip


def run_curves(training: TrainingRun, names: Sequence[str]) -> Figure:
    """A panel for each number of the whole run: the loss, the learning rate."""
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {**_marked(training, len(names), True), "showlegend": False}
    table: dict[str, list[Any]] = {"name": [], "step": [], "value": []}
    for panel, name in enumerate(names):
        every, values = training.scalar(name)
        chosen = evenly(range(len(every)), LOOKS)
        steps, drawn = [every[k] for k in chosen], np.array([values[k] for k in chosen])
        table["name"] += [name] * len(steps)
        table["step"] += steps
        table["value"] += drawn.tolist()
        axis, log = _axis(drawn)
        said = [f"step {step}<br>{escaped(title_of(name))} <b>{_number(value)}</b>"
                for step, value in zip(steps, drawn.tolist(), strict=True)]  # fmt: skip
        data.append(
            trace(steps, _placed(drawn, axis if log else None), said, panel, **_line(colour(0), len(steps)))
        )
        layout |= _axes(panel, axis, log, "", drawn)
    layout["annotations"] = [
        *layout.get("annotations", []),
        *map(heading, map(title_of, names), range(len(names))),
    ]
    return _kept(figure(
        data, layout, table, f"{', '.join(map(title_of, names))} over the steps.".capitalize(),
        panels=len(names), columns=min(2, len(names)),
    ), "run")  # fmt: skip


def path_shares(training: TrainingRun) -> Figure:
    """What paths of each length carry of the output, over the steps."""
    rows = training.paths
    names = training.lengths
    data: list[dict[str, Any]] = []
    table: dict[str, list[Any]] = {"of": [], "step": [], "value": []}
    for place, name in enumerate(names):
        part = rows.filter(pl.col("of") == name).sort("step")
        chosen = evenly(range(len(part)), LOOKS)
        steps = part["step"].gather(chosen).to_list()
        values = part["value"].fill_null(math.nan).gather(chosen).to_list()
        for column, each in zip(table, ([name] * len(steps), steps, values), strict=True):
            table[column] += each
        said = [f"step {step}, {escaped(name)}<br><b>{value:.1%}</b> of the output"
                for step, value in zip(steps, values, strict=True)]  # fmt: skip
        ink = in_order(place / max(1, len(names) - 1))
        data.append(trace(steps, values, said, name=escaped(name), **_line(ink, len(steps))))
    if len(names) > LISTED:
        data.append(scale("length of the path", [name.removeprefix("length ") for name in names]))
    layout = {
        "showlegend": len(names) <= LISTED,
        "xaxis": _steps(), "yaxis": {"title": {"text": "share of the output"}, "tickformat": ".0%"},
        **_marked(training, 1),
    }  # fmt: skip
    return _kept(figure(data, layout, table, "Path shares over the steps."), "paths")


def _drawn(training: TrainingRun, grid: Grid) -> Grid:
    """At most so many looks, the first, the last and those with alarms among them."""
    if len(grid.steps) <= LOOKS:
        return grid
    alarmed = set(training.alarms["step"].to_list()[:MARKS])
    kept = {k for k, step in enumerate(grid.steps) if step in alarmed}
    at = sorted(kept | set(evenly(range(len(grid.steps)), LOOKS)))
    return grid._replace(steps=[grid.steps[k] for k in at], value=grid.value[:, at], floor=grid.floor[:, at])


def _axis(values: np.ndarray) -> tuple[Powers, bool]:
    """An axis of powers, and whether it is the one to draw on."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return Powers(np.log10(values[values > 0]).tolist()), decades(values) > 2


def _placed(values: np.ndarray, axis: Powers | None) -> list[float | None]:
    if axis is None:
        return [value if math.isfinite(value) else None for value in values.tolist()]
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log10(values)
    return axis.place(np.where(logs == -np.inf, axis.low, logs))


def _axes(panel: int, axis: Powers, log: bool, title: str, values: np.ndarray) -> dict[str, Any]:
    linear = {"title": {"text": title}, "exponentformat": "power", "zeroline": False}
    low, high = _ends(values)
    if high - low <= 1e-9 * abs(high) and high:  # plotly would draw it at 0 of an axis from -1 to 1
        linear["range"] = sorted([0.0, 2 * high])
    return {f"xaxis{suffix(panel)}": _steps(), f"yaxis{suffix(panel)}": axis.axis(title) if log else linear}


def _steps() -> dict[str, Any]:
    return {
        "title": {"text": "step"},
        "zeroline": False,
        "nticks": 5,
        "tickangle": 0,
        "separatethousands": True,
    }


def _line(ink: str, looks: int) -> dict[str, Any]:
    """A line; of few looks with marks, so that a single one is seen."""
    return {"mode": "lines+markers" if looks <= 40 else "lines", "line": {"color": ink, "width": 2},
            "marker": {"color": ink, "size": 5}}  # fmt: skip


def _marked(training: TrainingRun, panels: int, headed: bool = False) -> dict[str, Any]:
    """A dotted line at every step with an alarm, and a mark on top that says the sentences: inside a panel
    that is `headed`."""
    said: dict[int, list[str]] = {}
    for row in training.alarms.iter_rows(named=True):
        said.setdefault(row["step"], []).append(_sentence(row["sentence"]))
    lines, marks = [], []
    for step in list(said)[-MARKS:]:
        for panel in range(panels):
            x, y = f"x{suffix(panel)}", f"y{suffix(panel)} domain"
            lines.append({"type": "line", "xref": x, "yref": y, "x0": step, "x1": step, "y0": 0, "y1": 1,
                          "line": {"color": FAINT, "width": 1, "dash": "dot"}})  # fmt: skip
            marks.append({"xref": x, "yref": y, "x": step, "y": 1, "yanchor": "top" if headed else "bottom",
                          "yshift": 3 if headed else -3,
                          "showarrow": False, "text": "▼", "font": {"size": 11, "color": ALARM},
                          "hovertext": "<br>".join([f"alarm at step {step}", *said[step]])})  # fmt: skip
    return {"shapes": lines, "annotations": marks} if lines else {}


ALARM = "#d55e00"
"""The palette's vermilion: told from viridis by everyone."""


def _rings(training: TrainingRun, grid: Grid) -> list[dict[str, Any]]:
    """Where an alarm names a layer, a ring at its place."""
    rows = training.alarms.filter(pl.col("layer").is_in(grid.layers)).tail(MARKS)
    if rows.is_empty():
        return []
    said = [f"alarm at step {row['step']}, layer {row['layer']}<br>{_sentence(row['sentence'])}"
            for row in rows.iter_rows(named=True)]  # fmt: skip
    marker = {"size": 10, "symbol": "circle", "color": ALARM, "line": {"width": 2, "color": "#ffffff"}}
    return [trace(rows["step"].to_list(), rows["layer"].to_list(), said, mode="markers", marker=marker)]


def _sentence(text: object) -> str:
    return "<br>".join(escaped(line) for line in textwrap.wrap(str(text), 70)[:8])


def _unit(metric: str) -> str:
    return escaped(NAMES[metric]) if metric in NAMES else written(metric)


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "no number"


def _numbers(grid: Grid) -> list[list[str]]:
    return [
        [_number(value) + NOISE * noise for value, noise in zip(row, low, strict=True)]
        for row, low in zip(grid.value.tolist(), grid.noise.tolist(), strict=True)
    ]


def _ends(values: np.ndarray) -> tuple[float, float]:
    known = values[np.isfinite(values)]
    return (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)


def _span(values: np.ndarray) -> str:
    return "from {:.3g} to {:.3g}".format(*_ends(values))


def _last(training: TrainingRun) -> int:
    return training.steps[-1] if training.steps else 0


def _table(grid: Grid) -> dict[str, list[Any]]:
    """For CSV: what is drawn."""
    number, looks = len(grid.layers), len(grid.steps)
    return {
        "metric": [grid.metric] * (number * looks),
        "step": grid.steps * number,
        "layer": [layer for layer in grid.layers for _ in range(looks)],
        "value": grid.value.flatten().tolist(),
        "floor": grid.floor.flatten().tolist(),
    }


def _kept(drawn: Figure, name: str) -> Figure:
    """What a reader has zoomed into stays when more is drawn."""
    drawn["layout"]["uirevision"] = name
    return drawn

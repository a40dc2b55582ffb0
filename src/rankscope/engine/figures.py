"""Figures of a sweep: a metric by layer in small multiples, and at the last layer by the levels of each
factor.

`Sweep.plot` draws both below each other, the report each on its own.
"""

from dataclasses import replace

import numpy as np

from rankscope import figures as fig
from rankscope.engine.views import Levels, SweepView
from rankscope.figures import evenly
from rankscope.profiles import metric_title
from rankscope.trainings import ends

PANELS = 6  # panels at most; of more levels the ends and some between
CELLS = 2000  # cells that are drawn as points at most
NOTHING = 0.005  # share of the differences below which a factor does nothing that could be seen


def sweep_curves_chart(view: SweepView, colour: str | None, panel: str | None, most: int = PANELS) -> fig.Chart:
    """A panel for each level of one factor, a line for each of another: the median of cells, in a band from the least
    to the largest of them. The more lines, the fainter the bands; the lines stay as they are.

    Args:
        view: One metric of a sweep.
        colour: The factor whose levels are lines; None draws one line.
        panel: The factor whose levels are panels; None draws one panel.
        most: Panels at most; of more levels the first, the last and some between are drawn.
    """
    lines, panel_levels = view.levels(colour), view.levels(panel)
    shown = evenly(range(len(panel_levels.labels)), most)
    curves = [curve for curve in view.curves(colour, panel) if curve.panel in shown]
    y, panels = _value_axis(view), []
    for level in shown:
        marks, depth, title = [], 1, _called(panel_levels, level)
        for curve in curves:
            if curve.panel != level:
                continue
            name, depth = _called(lines, curve.colour), max(depth, len(curve.centre) - 1)
            cells = f", median of {curve.cells} cells"
            hover: list[fig.Hover] = [
                (f"{title} {name}\nlayer {layer}: ", view.shown(value), cells)
                for layer, value in enumerate(curve.centre)
            ]
            x, ink = np.arange(len(curve.centre)), _colour(lines, curve.colour)
            line = fig.Line(x, curve.centre, ink, name or None, f"level {curve.colour}", hover=hover)
            marks.append(replace(line, bands=[(curve.low, curve.high)], strength=min(1.0, 3 / len(lines.labels))))
        panels.append(fig.Panel(fig.Axis("layer", last=depth), y, marks, title or "all cells"))
    rows = [
        (panel_levels.labels[curve.panel], lines.labels[curve.colour], layer, *numbers, curve.cells)
        for curve in curves
        for layer, numbers in enumerate(zip(curve.centre, curve.low, curve.high, strict=True))
    ]
    columns = (panel or "panel", colour or "line", "layer", f"{view.column}_median", "low", "high", "cells")
    panelled = f"in {len(shown)} panels by {panel or 'nothing'}"
    alt = f"{view.metric} by layer, {panelled}, a line for each {colour or 'sweep'}."
    size, across = (max(3.1, 6.4 / max(len(shown), 1)), 3.1), 2 if len(shown) > 1 else 1
    return fig.Chart(panels, fig.columns_of(columns, rows), alt, columns=across, height=330, shared=True, size=size)


def sweep_levels_chart(view: SweepView, most: int = PANELS) -> fig.Chart:
    """A panel for each factor, at most `most`: every cell at its last layer above its level, and the median
    of each level."""
    factors = list(view.effects)[:most]
    y, panels = _value_axis(view), []
    some = evenly(range(len(view.cells)), CELLS)
    hover: list[fig.Hover] = [
        (f"cell {view.cells['cell'][row]}\n{view.described(row)}\n", view.shown(view.ends[row]), "") for row in some
    ]
    noise = view.cells["noise"].to_numpy()[some]
    hollow = noise if noise.any() else None
    aside = 0.5 * (np.array(some) * 0.618034 % 1 - 0.5)
    for factor in factors:
        levels = view.levels(factor)
        at, deep = _places(levels)
        apart = float(np.diff(at).min(initial=at[-1] - at[0] or 1.0))
        middles = [_median(view.ends[levels.of == level]) for level in range(len(levels.labels))]
        words: list[fig.Hover] = [
            (f"{factor} {name}: median ", view.shown(value), "")
            for name, value in zip(levels.labels, middles, strict=True)
        ]
        x = at[levels.of[some]] + apart * aside
        marks = [
            fig.Points(x, view.ends[some], fig.line_colour(0), "dot", 5, 0.4, hollow, hover),
            fig.Points(at, middles, "ink", "bar", 14 if deep else 26, 1.0, hover=words),
        ]
        names = dict(zip(at.tolist(), levels.labels, strict=True))
        named = fig.Axis(factor, range=(-0.6, at[-1] + 0.6), labels=names, grid=False)
        axis = fig.Axis(factor, last=int(at[-1])) if deep else named
        share = view.effects[factor]
        does = "next to nothing" if share < NOTHING else f"{share:.0%} of the differences"
        panels.append(fig.Panel(axis, y, marks, f"{factor}: {does}"))
    columns = ("cell", *factors, "value", "log10")
    table = fig.columns_of(columns, [tuple(view.cells[name][row] for name in columns) for row in some])
    alt = f"{view.metric} at the last layer of each cell, by {', '.join(factors)}."
    across = 2 if len(factors) > 1 else 1
    return fig.Chart(panels, table, alt, columns=across, height=330, legend=False, size=(3.1, 3.1))


def _places(levels: Levels) -> tuple[np.ndarray, bool]:
    """Where levels stand: side by side; those of a depth, and then it is True, at their numbers, so that
    twice the depth is twice as far."""
    if levels.factor == "depth" and len(levels.labels) > 1 and all(map(str.isdecimal, levels.labels)):
        return np.array(levels.labels, float), True
    return np.arange(len(levels.labels), dtype=float), False


def _value_axis(view: SweepView) -> fig.Axis:
    """One scale for all panels."""
    title, numbers = metric_title(view.metric), view.layers[view.column].to_numpy()
    if view.log:
        return fig.Axis(title, fig.Powers(numbers.tolist()))
    low, high = ends(numbers)
    room = 0.05 * (high - low) or 0.5
    return fig.Axis(title, range=(low - room, high + room))


def _colour(levels: Levels, index: int) -> str:
    return fig.ordered_colour(index / max(1, len(levels.labels) - 1)) if levels.ordered else fig.line_colour(index)


def _called(levels: Levels, index: int) -> str:
    return f"{levels.factor} {levels.labels[index]}" if levels.factor else ""


def _median(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else float("nan")

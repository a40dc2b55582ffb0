"""The figure of a sweep: a metric by layer in small multiples, and at the last layer factor by factor."""

import math
from typing import Any

import numpy as np

from rankscope.engine.views import Levels, SweepView
from rankscope.figures.matplotlib import (
    Axes,
    AxesLike,
    Figure,
    FuncFormatter,
    Line2D,
    MaxNLocator,
    NullLocator,
    colormaps,
    panels,
    styled,
)
from rankscope.figures.style import INK, PALETTE
from rankscope.figures.text import label, tick
from rankscope.metrics import symbol_of

PANELS = 4
"""In a row, at most; of more levels the ends and some between."""
DEEP = 40
"""Decades over which the axis of powers is logarithmic itself."""
LABELS = 7
"""Powers of ten on an axis, about."""
NOTHING = 0.005
"""Shares of the order below which a factor does nothing that could be seen."""


@styled
def plot_sweep(
    view: SweepView, ax: AxesLike | None = None, figsize: tuple[float, float] | None = None
) -> Figure:
    """Lines: the median of cells, bands their range. Below: every cell at its last layer, and medians."""
    colour, panel = view.arranged
    factors = list(view.effects)[:PANELS]
    inks, places = view.levels(colour), view.levels(panel)
    shown = _some(len(places.labels), PANELS)
    columns = max(len(shown), len(factors), 1)
    rows = 2 if factors else 1
    figure, axes = panels(
        columns, width=max(3.1, 6.4 / columns), height=3.1, rows=rows, ax=ax, figsize=figsize
    )
    _draw_curves(axes, view, inks, places, shown)
    for place, name in enumerate(factors):
        _draw_levels(axes[columns + place], view, view.levels(name), place == 0)
    for each in [*axes[len(shown) : columns], *axes[columns + len(factors) :]]:
        each.set_visible(False)
    for place, each in enumerate(axes):
        _dress(each, view, place % columns == 0)
    if colour is not None:
        handles = [
            Line2D([], [], color=_ink(inks, number), linewidth=2.0, label=label(f"{colour} {name}"))
            for number, name in enumerate(inks.labels)
        ]
        if ax is None:
            figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 6))
        else:
            axes[0].legend(handles=handles)
    return figure


def _draw_curves(axes: Any, view: SweepView, inks: Levels, places: Levels, shown: list[int]) -> None:
    for curve in view.curves(inks.factor or None, places.factor or None):
        if curve.panel not in shown:
            continue
        each, ink = axes[shown.index(curve.panel)], _ink(inks, curve.colour)
        layers = np.arange(len(curve.centre))
        few = min(1.0, 3 / len(inks.labels))
        each.fill_between(layers, curve.low, curve.high, color=ink, alpha=0.18 * few, linewidth=0)
        each.plot(layers, curve.centre, color=ink, linewidth=1.7)
    for place, level in enumerate(shown):
        title = f"{places.factor} {places.labels[level]}" if places.factor else "all cells"
        axes[place].set_title(label(title), loc="left")
        axes[place].set_xlabel("layer")
        axes[place].xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))


def _draw_levels(axes: Axes, view: SweepView, levels: Levels, first: bool) -> None:
    """Every cell above its level, and a bar at their median."""
    there = np.isfinite(view.ends)
    spread = 0.5 * (np.arange(len(view.ends)) * 0.618034 % 1 - 0.5)
    axes.scatter(
        (levels.of + spread)[there], view.ends[there], s=9, color=PALETTE[0], alpha=0.35, linewidth=0
    )
    medians = [
        (place, float(np.median(view.ends[there & (levels.of == place)])))
        for place in range(len(levels.labels))
        if (there & (levels.of == place)).any()
    ]
    for place, middle in medians:
        axes.plot([place - 0.32, place + 0.32], [middle, middle], color=INK, linewidth=2.0)
    axes.set_xticks(range(len(levels.labels)), [label(name) for name in levels.labels], fontsize=9)
    if max(map(len, levels.labels)) * len(levels.labels) > 34:
        axes.tick_params("x", rotation=35)
    axes.set_xlabel(label(levels.factor))
    share = view.effects[levels.factor]
    said = "next to nothing" if share < NOTHING else f"{share:.0%} of the differences"
    axes.set_title(label(f"{'last layer: ' if first else ''}{said}"), loc="left", fontsize=10)
    axes.grid(False, axis="x")


def _dress(axes: Axes, view: SweepView, first: bool) -> None:
    """One scale for all panels, named at the left."""
    known = view.layers[view.column].to_numpy()
    known = known[np.isfinite(known)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    if view.log and high - low > DEEP:
        axes.set_yscale("symlog", linthresh=1.0)
        ends = [math.copysign(1 + math.log10(abs(k)), k) if abs(k) > 1 else k for k in (low, high)]
        room = 0.05 * (ends[1] - ends[0])
        axes.set_ylim(
            *(
                math.copysign(10 ** (abs(k) - 1), k) if abs(k) > 1 else k
                for k in (ends[0] - room, ends[1] + room)
            )
        )
        most = math.ceil(math.log10(max(abs(low), abs(high))))
        steps = [10.0**k for k in range(0, most + 1, math.ceil((most + 1) / LABELS))]
        axes.set_yticks([k for k in (*(-each for each in steps), 0.0, *steps[1:]) if low <= k <= high + 1])
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        room = 0.04 * (high - low) or 0.5
        axes.set_ylim(low - room, high + room)
    if view.log:
        axes.yaxis.set_major_formatter(FuncFormatter(tick))
    if first:
        axes.set_ylabel(f"${symbol_of(view.metric, tex=True)}$")
    else:
        axes.tick_params("y", labelleft=False)


def _ink(levels: Levels, number: int) -> Any:
    if not levels.ordered:
        return PALETTE[number % len(PALETTE)]
    return colormaps["viridis"](0.9 * number / max(1, len(levels.labels) - 1))


def _some(number: int, most: int) -> list[int]:
    if number <= most:
        return list(range(number))
    return [round(k * (number - 1) / (most - 1)) for k in range(most)]

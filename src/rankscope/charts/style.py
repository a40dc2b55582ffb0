"""One look for every chart: the palette of `figures.py`, and what plotly calls its markers and dashes.

Colours of text, grid and ground are not here: `draw.js` puts them in by the reader's theme. A colour that
must follow it is written `@ink`, `@faint`, `@paper`, or `@order 0.3` of a place in an order.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from rankscope.charts.escaping import Figure, escaped, plain
from rankscope.figures.style import PALETTE

INK, FAINT, PAPER = "@ink", "@faint", "@paper"
COLOURS = tuple(INK if colour == "#000000" else colour for colour in PALETTE)
SYMBOLS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x", "star")
DASHES = ("solid", "dash", "dashdot", "longdash", "5px,2px", "longdashdot", "8px,3px,2px,3px", "solid")
SEQUENCE = ("#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b")
"""Viridis: an order that survives grey print and every kind of colour blindness."""
SEQUENTIAL = [[k / (len(SEQUENCE) - 1), colour] for k, colour in enumerate(SEQUENCE)]
DIVERGING = [[0.0, PALETTE[1]], [0.5, PAPER], [1.0, PALETTE[0]]]
HOVER = "%{text}<extra></extra>"
"""Our own words alone, without what plotly adds."""
HEIGHT = 380
"""Pixels of one row of panels."""

Item = TypeVar("Item")


def colour(number: int) -> str:
    """The colour of the line of that number."""
    return COLOURS[number % len(COLOURS)]


def symbol(number: int, hollow: bool = False) -> str:
    """The mark of the line of that number."""
    return SYMBOLS[_turned(number)] + ("-open" if hollow else "")


def dash(number: int) -> str:
    """The dash of the line of that number."""
    return DASHES[_turned(number)]


def _turned(number: int) -> int:
    """Colours come again after eight lines, each time with another mark and dash."""
    return (number + number // len(COLOURS)) % len(SYMBOLS)


def in_order(place: float) -> str:
    """A colour of an order, `place` from 0 to 1: `draw.js` takes it from the part of viridis that stands out
    from the ground.

    >>> in_order(0.25)
    '@order 0.25'
    """
    return f"@order {place:.2f}"


def scale(title: str, labels: Sequence[str]) -> dict[str, Any]:
    """A bar of colours beside the figure, in place of a legend of many lines that are in an order. `labels`
    are those of the lines, some of which it shows."""
    last = len(labels) - 1
    shown = list(range(0, last + 1, -(-(last + 1) // 7)))
    bar = {
        "thickness": 10, "outlinewidth": 0, "title": {"text": escaped(title), "side": "right"},
        "tickvals": shown, "ticktext": [escaped(labels[k]) for k in shown],
    }  # fmt: skip
    colours = [[k / 14, in_order(k / 14)] for k in range(15)]
    marker = {"color": [0, last], "cmin": 0, "cmax": last, "colorscale": colours, "colorbar": bar,
              "showscale": True}  # fmt: skip
    return trace([None], [None], mode="markers", marker=marker, showlegend=False)


def suffix(panel: int) -> str:
    """How plotly numbers the axes of a panel: none, 2, 3, ..."""
    return "" if panel == 0 else str(panel + 1)


def trace(
    x: Sequence[Any] | np.ndarray,
    y: Sequence[Any] | np.ndarray,
    said: Sequence[str] | None = None,
    panel: int = 0,
    **look: Any,
) -> dict[str, Any]:
    """A line in a panel, or marks, by its `mode`. `said` is shown of the point that one points at."""
    hover = {"hoverinfo": "skip"} if said is None else {"text": said, "hovertemplate": HOVER}
    place = {"xaxis": f"x{suffix(panel)}", "yaxis": f"y{suffix(panel)}"}
    return {"type": "scatter", "mode": "lines", "x": x, "y": y, **place, **hover, **look}


def evenly(items: Sequence[Item], most: int) -> list[Item]:
    """So many of them at most, the first and the last among them.

    >>> evenly("abcdefg", 4)
    ['a', 'c', 'e', 'g']
    """
    if len(items) <= most:
        return list(items)
    return [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)]


def heading(text: str, panel: int) -> dict[str, Any]:
    """The title of a panel, above it on the left; it follows the panel where that goes."""
    return {
        "text": f"<b>{escaped(text)}</b>", "showarrow": False, "x": 0, "y": 1, "xanchor": "left",
        "yanchor": "bottom", "yshift": 4, "align": "left",
        "xref": f"x{suffix(panel)} domain", "yref": f"y{suffix(panel)} domain",
    }  # fmt: skip


def figure(
    data: list[dict[str, Any]],
    layout: dict[str, Any],
    table: Mapping[str, Sequence[Any]],
    alt: str,
    panels: int = 1,
    columns: int | None = None,
    frames: list[dict[str, Any]] | None = None,
) -> Figure:
    """A figure as JSON can hold it.

    `layout.height` is that of one row of panels; `draw.js` multiplies it, and stacks panels on a narrow
    screen. `table` is the figure's data by column, for CSV. `alt` says in a sentence what is drawn.
    """
    whole: dict[str, Any] = {
        "height": HEIGHT,
        "margin": {"l": 64, "r": 16, "t": 60 if layout.get("annotations") else 30, "b": 48},
        "hovermode": "closest",
        "legend": {"orientation": "h", "x": 0, "yref": "container", "y": 0, "yanchor": "bottom"},
        **layout,
    }
    if panels > 1:
        columns = columns or panels
        whole["grid"] = {
            "rows": -(-panels // columns), "columns": columns, "pattern": "independent", "xgap": 0.18,
            "ygap": 0.32,
        }  # fmt: skip
    found = {"data": data, "layout": whole, "table": table, "alt": alt, "panels": panels}
    return plain(found if frames is None else {**found, "frames": frames})

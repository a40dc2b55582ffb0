"""Figures: one description of each, a `Chart`, which `figures.plot` draws with matplotlib, `figures.page` on
a page.

Only `figures.matplotlib` and `figures.plot` import matplotlib.
"""

from rankscope.figures.description import (
    Axis,
    Bars,
    Chart,
    ColourBar,
    Flag,
    Formula,
    Frame,
    Heatmap,
    Line,
    Panel,
    Points,
    Spans,
)

__all__ = [
    "Axis",
    "Bars",
    "Chart",
    "ColourBar",
    "Flag",
    "Formula",
    "Frame",
    "Heatmap",
    "Line",
    "Panel",
    "Points",
    "Spans",
]

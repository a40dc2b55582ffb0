"""Figures: one description of each (`Chart`), drawn with matplotlib (`figures.plot`) or on a page (`figures.page`).

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

"""Figures: one description of each, which `figures.drawing` draws with matplotlib and `figures.page` on a page.

Only `figures.matplotlib` and `figures.drawing` import matplotlib, and what is drawn is imported when it is first asked
for: `from rankscope.figures import Chart` needs no matplotlib, `from rankscope.figures import panels` does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rankscope.figures.description import *  # noqa: F403  the names of its __all__
from rankscope.figures.description import __all__ as _described
from rankscope.figures.powers import DEEP
from rankscope.figures.style import (
    ALARM,
    FAINT,
    INK,
    LISTED,
    MARKERS,
    NUMBER,
    PALETTE,
    evenly,
    in_sequence,
    line_style,
    numbered,
)
from rankscope.figures.text import TURNS, label, plain, power, script_json, sparkline, sparklines, thinned, tick

if TYPE_CHECKING:
    from rankscope.figures.drawing import plot
    from rankscope.figures.matplotlib import SHARPNESS, Axes, AxesLike, Figure, palette, panels, png, rendered, save
    from rankscope.figures.page import page_figure, plotly_script, static_file

_LAZY = {"plot": "drawing", "page_figure": "page", "plotly_script": "page", "static_file": "page"}
"""Names that are imported when first asked for, with their modules; those not listed are of `matplotlib`."""

__all__ = [
    *_described, "ALARM", "DEEP", "FAINT", "INK", "LISTED", "MARKERS", "NUMBER", "PALETTE", "SHARPNESS", "TURNS",
    "evenly", "in_sequence", "label", "line_style", "numbered", "plain", "power", "script_json", "sparkline",
    "sparklines", "thinned", "tick", "Axes", "AxesLike", "Figure", "page_figure", "palette", "panels", "plot",
    "plotly_script", "png", "rendered", "save", "static_file",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"rankscope.figures.{_LAZY.get(name, 'matplotlib')}"), name)
    raise AttributeError(f"module 'rankscope.figures' has no attribute {name!r}")

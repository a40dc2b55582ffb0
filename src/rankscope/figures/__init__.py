"""Figures: one description of each, which `figures.drawing` draws with matplotlib and `figures.page` on a page.

Only `figures.matplotlib` and `figures.drawing` import matplotlib, and what is drawn is imported when it is first asked
for: `from rankscope.figures import Chart` needs no matplotlib, `from rankscope.figures import panels` does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rankscope.figures.description import *  # noqa: F403  the names of its __all__
from rankscope.figures.description import __all__ as _described
from rankscope.figures.powers import DEEP
from rankscope.figures.style import FAINT, INK, MARKERS, PALETTE, evenly, line_style
from rankscope.figures.text import label, power, sparkline, sparklines, thinned, tick

if TYPE_CHECKING:
    from rankscope.figures.drawing import plot
    from rankscope.figures.matplotlib import Axes, AxesLike, Figure, palette, panels, png, rendered, save

__all__ = [
    *_described, "DEEP", "FAINT", "INK", "MARKERS", "PALETTE", "evenly", "label", "line_style", "power", "tick",
    "Axes", "AxesLike", "Figure", "palette", "panels", "plot", "png", "rendered", "save",
    "sparkline", "sparklines", "thinned",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"rankscope.figures.{'drawing' if name == 'plot' else 'matplotlib'}"), name)
    raise AttributeError(f"module 'rankscope.figures' has no attribute {name!r}")

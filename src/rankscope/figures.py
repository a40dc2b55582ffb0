"""One look for every figure: quiet axes, files in PNG and SVG.

The door by which matplotlib comes in: who draws takes its names from here, and where it is not installed is
told so in a sentence.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rankscope.extras import need
from rankscope.files import atomic
from rankscope.looks import FAINT, INK

need("a figure", "matplotlib", "PIL")
# ruff: noqa: E402  What follows is there: else the line above has said what is missing.
from matplotlib import colormaps, rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator
from PIL import Image

__all__ = [
    "Artist",
    "Axes",
    "Drawing",
    "Figure",
    "FixedLocator",
    "FuncFormatter",
    "Image",
    "Line2D",
    "ListedColormap",
    "MaxNLocator",
    "Normalize",
    "NullFormatter",
    "NullLocator",
    "SHARPNESS",
    "ScalarMappable",
    "colormaps",
    "panels",
    "png",
    "rendered",
    "save",
]

STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "savefig.dpi": 160,
    "svg.fonttype": "path",
    "svg.hashsalt": "rankscope",
}

SHARPNESS = 2
"""Pixels of a picture for each pixel of the page: screens of today, and zooming in, show them."""
COLOURS = 128
"""Of a picture, at most: a quarter of the bytes, and no difference to be seen."""


class Drawing(Figure):
    """A figure that shows itself at the end of a notebook's cell, whether or not pyplot was imported."""

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        image = rendered(self)
        return png(image), {"width": image.width // SHARPNESS, "height": image.height // SHARPNESS}


def panels(
    number: int = 1, width: float = 6.4, height: float = 4.0, rows: int = 1
) -> tuple[Figure, Sequence[Axes]]:
    """A figure with panels side by side, in as many rows, in the house style; no global state is touched."""
    with rc_context(STYLE):
        figure: Figure = Drawing(figsize=(width * number, height * rows), layout="constrained")
        axes = figure.subplots(rows, number, squeeze=False)
    return figure, list(axes.flat)


def rendered(figure: Figure) -> Image.Image:
    """The figure as pixels, `SHARPNESS` of them to each of the 72 in an inch of a page."""
    buffer = io.BytesIO()
    with rc_context(STYLE):
        figure.savefig(buffer, format="png", dpi=72 * SHARPNESS)
    return Image.open(buffer).convert("RGB")


def png(image: Image.Image, colours: int = COLOURS) -> bytes:
    """The bytes of a small PNG, of so many colours at most."""
    buffer = io.BytesIO()
    image.quantize(colours, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def save(figure: Figure, stem: str | Path) -> list[Path]:
    """Write `stem.png` and `stem.svg`."""
    written = []
    for suffix in (".png", ".svg"):
        path = Path(f"{stem}{suffix}")
        with atomic(path) as temporary, rc_context(STYLE):
            figure.savefig(temporary, metadata={"Date": None} if suffix == ".svg" else None)
        written.append(path)
    return written

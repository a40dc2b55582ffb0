"""One look for every figure: quiet axes, files in PNG and SVG. What a user has set in matplotlib's `rcParams`
stands: the house style fills in the rest.

The door by which matplotlib comes in: who draws takes its names from here, and where it is not installed is
told so in a sentence.
"""

import io
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from importlib.resources import files
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from rankscope.errors import FigureError
from rankscope.extras import need
from rankscope.figures.style import PALETTE
from rankscope.files import atomic

need("a figure", "matplotlib", "PIL")
# ruff: noqa: E402  What follows is there: else the line above has said what is missing.
from matplotlib import colormaps, rc_context, rc_params_from_file, rcParams, rcParamsDefault
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, Locator, MaxNLocator, NullFormatter, NullLocator
from PIL import Image

__all__ = [
    "Axes", "AxesLike", "Drawing", "Figure", "FixedLocator", "FuncFormatter", "Image", "Line2D",
    "LinearSegmentedColormap", "ListedColormap", "Locator", "MaxNLocator", "Normalize", "NullFormatter",
    "NullLocator", "SHARPNESS", "ScalarMappable", "colormaps", "palette", "panels", "png", "rcParams",
    "rendered", "save", "styled",
]  # fmt: skip

P = ParamSpec("P")
T = TypeVar("T")
AxesLike = Axes | Iterable[Any]
"""Where to draw: axes of the user's own, one or as many as a figure has panels, as `subplots` gives them."""

STYLE = rc_params_from_file(str(files("rankscope").joinpath("data/house.mplstyle")), use_default_template=False)

SHARPNESS = 2  # Pixels of a picture for each pixel of the page: screens of today, and zooming in, show them
COLOURS = 128  # Of a picture, at most: a quarter of the bytes, and no difference to be seen


def house() -> dict[Any, Any]:
    """The house style, less what the user has set."""
    return {name: value for name, value in STYLE.items() if not _is_set(name)}


def _is_set(name: Any) -> bool:
    return bool(rcParams[name] != rcParamsDefault[name])


def styled(draw: Callable[P, T]) -> Callable[P, T]:
    """Drawn in the house style, where the user has none."""

    @wraps(draw)
    def drawn(*args: P.args, **options: P.kwargs) -> T:
        with rc_context(house()):
            return draw(*args, **options)

    return drawn


def palette() -> Sequence[str]:
    """Colours of lines: the user's cycle, where one is set."""
    if not _is_set("axes.prop_cycle"):
        return PALETTE
    return list(rcParams["axes.prop_cycle"].by_key().get("color", PALETTE))


class Drawing(Figure):
    """A figure that shows itself at the end of a notebook's cell, whether or not pyplot was imported."""

    def savefig(self, *args: Any, **options: Any) -> None:
        """As matplotlib does, in the house style where the user has none: fonts of a PDF are Type 42."""
        with rc_context(house()):
            super().savefig(*args, **options)

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        image = rendered(self)
        return png(image), {"width": image.width // SHARPNESS, "height": image.height // SHARPNESS}


def panels(
    columns: int = 1,
    width: float = 6.4,
    height: float = 4.0,
    rows: int = 1,
    *,
    ax: AxesLike | None = None,
    figsize: tuple[float, float] | None = None,
) -> tuple[Figure, Sequence[Axes]]:
    """A figure with panels in the house style; no global state is touched.

    Args:
        columns: Panels in a row.
        width: Inches of a panel across.
        height: Inches of a panel up.
        rows: Rows of panels.
        ax: Axes to draw into instead, one for each panel.
        figsize: Inches of the whole figure, in place of those of its panels.

    Raises:
        FigureError: There are more or fewer axes than panels, or a size beside axes.
    """
    if ax is not None:
        return _given(ax, columns * rows, figsize)
    usual = tuple(rcParams["figure.figsize"]) if _is_set("figure.figsize") else (width * columns, height * rows)
    with rc_context(house()):
        figure: Figure = Drawing(figsize=figsize or usual, layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
    return figure, list(axes.flat)


def _given(ax: AxesLike, count: int, figsize: tuple[float, float] | None) -> tuple[Figure, Sequence[Axes]]:
    axes = [ax] if isinstance(ax, Axes) else list(getattr(ax, "flat", ax))
    if figsize is not None:
        raise FigureError("figsize is of a new figure; received ax as well: size its figure", subject="figsize")
    if len(axes) != count or not all(isinstance(subplot, Axes) for subplot in axes):
        what = "one Axes" if count == 1 else f"{count} Axes, for as many panels"
        raise FigureError(f"ax must be {what}; received {len(axes)}: plt.subplots(1, {count}) makes them", subject="ax")
    figure = axes[0].get_figure(root=True)  # of axes of a subfigure, too
    assert figure is not None
    return figure, axes


def rendered(figure: Figure) -> Image.Image:
    """The figure as pixels, `SHARPNESS` of them to each of the 72 in an inch of a page."""
    buffer = io.BytesIO()
    with rc_context(house()):
        figure.savefig(buffer, format="png", dpi=72 * SHARPNESS)
    return Image.open(buffer).convert("RGB")


def png(image: Image.Image, colours: int = COLOURS) -> bytes:
    """The bytes of a small PNG, of so many colours at most."""
    buffer = io.BytesIO()
    image.quantize(colours, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def save(figure: Figure, stem: str | Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write `stem.png` and `stem.svg`, or other formats, as `pdf`."""
    dated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    paths = {form: Path(f"{stem}.{form}") for form in formats}
    for form, path in paths.items():
        with atomic(path) as temporary, rc_context(house()):
            figure.savefig(temporary, format=form, metadata=dated.get(form))
    return list(paths.values())

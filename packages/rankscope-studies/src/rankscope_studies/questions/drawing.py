"""What the figures of several questions are drawn with: lines over bands of seeds, looks of lines, titles of panels."""

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from matplotlib.axes import Axes

X = TypeVar("X", int, float)


def seed_band(axes: "Axes", points: Mapping[X, Sequence[float]], label: str, colour: str, **style: Any) -> None:
    """Draw the medians over seeds as a line, and their range as a band.

    Args:
        axes: The panel to draw into.
        points: The values of all seeds by position on the horizontal axis; positions without values are left out.
        label: The name of the line in the legend.
        colour: The colour of line and band.
        style: Options of the line, in place of the usual ones.
    """
    known = sorted(x for x, values in points.items() if values)
    low, middle, high = ([pick(points[x]) for x in known] for pick in (min, statistics.median, max))
    axes.fill_between(known, low, high, color=colour, alpha=0.15, linewidth=0)
    options: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 1.4, **style}
    axes.plot(known, middle, color=colour, label=label, **options)


def line_look(index: int) -> dict[str, Any]:
    """The colour, marker and dash by which the line of an index is told from others, as options of `plot`."""
    from rankscope.figures import MARKERS, line_style, palette

    style = line_style(index, palette())
    return {"color": style.colour, "marker": MARKERS[style.marker], "linestyle": ("-", "--", ":")[style.turn % 3]}


def title_panel(axes: "Axes", title: str, x: str, y: str = "") -> None:
    """Write the title of a panel and the labels of its axes."""
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xlabel(x)
    axes.set_ylabel(y)

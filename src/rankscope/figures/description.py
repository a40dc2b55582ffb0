"""What a figure shows, as plain data: `figures.drawing` draws it for print, `figures.page` for a page.

Each room describes its own figures once (`profiles/figures.py`, `paths/figures.py`, `theory/figures.py`,
`engine/views.py`, `trainings/figures.py`). A `Chart` has panels, a `Panel` two axes and the marks on them:
`Line`, `Points`, `Bars`, `Spans` or `Heatmap`. Coordinates on an axis of powers are log10 of the number.

All text is plain: names come from models and may read `<script>` or `$x$`; each renderer escapes them in its
own way. Colours are names that a renderer looks up: "line 3" of the palette, "order 0.25" of viridis, "ink",
"faint", or a "#d55e00".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rankscope.figures.powers import Powers

__all__ = [
    "Axis", "Bars", "Chart", "ColourBar", "Flag", "Formula", "Frame", "Heatmap", "Hover", "Line", "Numbers", "Panel",
    "Points", "Powers", "Spans", "columns_of", "line_colour", "ordered_colour",
]  # fmt: skip

Numbers = Sequence[Any] | np.ndarray
Band = tuple[np.ndarray, np.ndarray]
Hover = tuple[str, str, str]
"""What a page says of a point: text before a number, the number (bold), text after; lines end at \\n."""


def line_colour(index: int) -> str:
    """The colour of the line of that index, from the palette."""
    return f"line {index}"


def ordered_colour(share: float) -> str:
    """A colour of an ordered scale, from dark at 0 to light at 1."""
    return f"order {share:.2f}"


@dataclass(frozen=True)
class Formula:
    """A label that print sets as a formula and a page as text."""

    text: str  # As a page shows it
    tex: str = ""  # For matplotlib, without dollars; the text where it is empty


@dataclass(frozen=True)
class Axis:
    """What stands along one side of a panel."""

    title: Formula | str = ""
    powers: Powers | None = None  # Coordinates are log10 of the numbers, on this axis of powers of ten
    last: int | None = None  # Whole numbers from 0 to this one: layers, heads, lengths
    steps: bool = False  # Steps of a training
    range: tuple[float, float] | None = None  # Where it begins and ends; as its numbers need it where None
    from_zero: bool = False  # It begins at 0
    percent: bool = False  # Numbers are shares of one, shown in percent
    labels: Mapping[float, str] | None = None  # Names in place of numbers, where they stand
    grid: bool = True  # Lines across the panel


@dataclass(frozen=True, eq=False)
class Line:
    """A line through points, with bands about it."""

    x: Numbers
    y: Numbers
    colour: str  # A name, as the module has them
    name: str | None = None  # Its entry in the legend, if it has one
    group: str = ""  # Marks of a group have one entry in the legend, that of the first, and hide together on a page
    index: int = 0  # Tells lines apart by their marker and dash, and orders those of groups in the legend
    marker: str | None = None  # None: no marks; "index": by `index`; or "dot", "at most", "at least"
    dash: str = "solid"  # "index": by `index`; or "solid", "dot", "dash"
    width: float = 2.0  # Pixels on a page
    noise: np.ndarray | None = None
    """Where a value lies at its floor: the line is thin and dotted there, its marks hollow."""
    hollow: np.ndarray | None = None  # Where marks alone are hollow
    bands: Sequence[Band] = ()  # Each from a lowest to a highest y, at each x
    strength: float = 1.0  # Of the bands: many upon each other would hide the lines
    hover: Sequence[Hover] | None = None  # Of each point


@dataclass(frozen=True, eq=False)
class Points:
    """Marks that no line goes through."""

    x: Numbers
    y: Numbers
    colour: str | Sequence[str]  # One for all, or one for each
    marker: str = "dot"  # "dot", "ring" (with a white edge) or "bar"
    size: float = 7.0  # Pixels on a page
    opacity: float = 0.85  # 1 hides what is behind
    hollow: np.ndarray | None = None  # Where a mark is hollow
    hover: Sequence[Hover] | None = None  # Of each point


@dataclass(frozen=True, eq=False)
class Bars:
    """Upright bars; several of them in a panel stand side by side."""

    x: Numbers
    heights: Numbers  # Of each bar, from zero
    colour: str
    name: str = ""  # Their entry in the legend
    hover: Sequence[Hover] | None = None  # Of each bar


@dataclass(frozen=True, eq=False)
class Spans:
    """Lying bars, each from a start to an end, in rows from above."""

    rows: Numbers  # The row of each bar
    starts: Numbers
    ends: Numbers
    colour: str
    name: str = ""  # Their entry in the legend


@dataclass(frozen=True, eq=False)
class Heatmap:
    """A square for each pair of x and y, coloured by its number."""

    x: Numbers
    y: Numbers
    values: np.ndarray  # [y, x]; log10 where there is an axis of powers
    title: Formula | str = ""  # Of the bar of colours
    powers: Powers | None = None  # Values are log10 of the numbers, on this scale of powers of ten
    range: tuple[float, float] | None = None  # Values of the first and the last colour
    signed: bool = False  # Blue above zero, orange below it, shares of a whole in percent
    numbers: bool = False  # Each square has its number written into it
    noise: np.ndarray | None = None  # [y, x]: where a value lies at its floor, the square is grey
    hover: Sequence[Sequence[Hover]] | None = None  # [y][x]


@dataclass(frozen=True)
class Flag:
    """A step at which something happened: a dotted line, and a mark on top that says what."""

    x: float  # The step
    text: str  # What happened


@dataclass(frozen=True, eq=False)
class Panel:
    """Two axes and what stands on them."""

    x: Axis
    y: Axis
    marks: Sequence[Line | Points | Bars | Spans | Heatmap]
    heading: Formula | str = ""  # Above it
    flags: Sequence[Flag] = ()  # Steps that are marked
    counts: Mapping[float, str] = field(default_factory=dict)
    """Small numbers along the upper edge, in print alone: a page says them where one points."""
    square: bool = False  # A unit is as long across as up


@dataclass(frozen=True)
class ColourBar:
    """Which line is which, where many are in an order: the labels of all, dark to light."""

    title: str  # What the lines are ordered by
    labels: Sequence[str]  # Of each line, in order


@dataclass(frozen=True)
class Frame:
    """One of the states that a page can play: new coordinates of each panel's points, and its headings."""

    name: str  # As the page's slider shows it
    points: Sequence[tuple[Numbers, Numbers]]  # x and y, by panel
    headings: Sequence[str]  # By panel


@dataclass(frozen=True, eq=False)
class Chart:
    """A figure, as both renderers draw it."""

    panels: Sequence[Panel]  # From left to right, row by row
    table: Mapping[str, Sequence[Any]]  # The numbers by column, which a page saves as CSV
    alt: str  # What is drawn, in a sentence
    columns: int | None = None  # Panels in a row; all of them where it is None
    legend: bool = True  # Whether there is one
    shared: bool = False  # In print one legend stands below all panels, not one in each
    colour_bar: ColourBar | None = None  # In the place of a legend
    height: int = 380  # Pixels of a row of panels, on a page
    size: tuple[float, float] = (6.4, 4.0)  # Inches of a panel, in print
    least: int | None = None  # Pixels that a panel needs across, on a page, where that is less than usual
    frames: Sequence[Frame] = ()  # States that a page plays
    kept: str = ""  # On a page, what a reader has zoomed into stays when a chart of the same name takes its place

    def beside(self, other: "Chart") -> "Chart":
        """Both in one row, under one legend."""
        return replace(self, panels=[*self.panels, *other.panels], columns=None, shared=True)

    def alone(self, panel: int) -> "Chart":
        """One panel as a chart of its own, without its heading."""
        return replace(self, panels=[replace(self.panels[panel], heading="")], columns=None)


def columns_of(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> dict[str, list[Any]]:
    """Rows of numbers as the table of a chart, by column."""
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))

"""What a result is shown as: sections, each a heading, a sentence, and pictures or tables under it.

Every room makes the `sections` of its own results; `result.py` shows them as a card, as text and as a figure, and the
report (`rankscope.report`) as a chapter. A picture is a `Chart`, drawn by whoever shows it.
"""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from rankscope.figures import Chart

Views = list[tuple[str, Chart]]  # Charts by the label under which a reader chooses them
SENTENCES: dict[str, dict[str, str]] = tomllib.loads(
    files("rankscope").joinpath("data", "report.toml").read_text(encoding="utf-8")
)


def sentence(section: str, name: str, **values: object) -> str:
    """A sentence of `data/report.toml`, filled with what the run says."""
    return SENTENCES[section][name].format(**values)


@dataclass(frozen=True)
class Table:
    """A table as text: headings, rows, and which cells are only noise."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: set[tuple[int, int]] = field(default_factory=set)  # Cells (row, column) that are only noise
    note: str = ""
    wordy: bool = False  # Holds sentences, not numbers
    titled: bool = False  # Its first column holds titles, which may take several lines
    folded: bool = False  # Shown when asked for
    curves: tuple[str, Sequence[str]] = ("", ())
    """A heading and, for each row, its curve in block letters (`figures.sparklines`): of a terminal."""
    spare: Sequence[str] = ()  # Headings of columns that go where there is little room, in this order
    keys: list[list[Any]] = field(default_factory=list)
    """What each cell is sorted by; a table without them stays in its order."""


@dataclass(frozen=True)
class Plot:
    """A figure in the page, or several of which one is shown."""

    key: str
    views: Views
    caption: str = ""
    small: bool = False

    @property
    def kind(self) -> str:
        """The kind of figure: curves, cloud, bounds, ..., or a small one."""
        return "small" if self.small else self.key.partition("-")[0]

    @property
    def chart(self) -> Chart:
        """The chart that is shown first, or alone."""
        return self.views[0][1]


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it.

    Args:
        heading: What the section is about.
        sentence: What it says, or how to read it.
        plots: Its pictures.
        tables: Its tables.
        notes: What a reader should know before.
        pictures: Of studies: a title and the picture as a data URI, for each.
        key: A word that a page finds it by; made from the heading if left out.

    >>> Section("What each head does", "Four heads carry most of it.").key
    'what-each-head-does'
    """

    heading: str
    sentence: str = ""
    plots: list[Plot] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    pictures: list[dict[str, str]] = field(default_factory=list)
    key: str = ""

    def __post_init__(self) -> None:
        if not self.key:
            object.__setattr__(self, "key", re.sub(r"\W+", "-", self.heading.lower()).strip("-"))

    @property
    def holds_something(self) -> bool:
        """True if there is a figure, a table or a picture in it."""
        return bool(self.plots or self.tables or self.pictures)

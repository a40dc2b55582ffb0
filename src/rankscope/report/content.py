"""What a page is made of: figures, tables and sentences on how to read them, in sections."""

import tomllib
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
    headings: list[str]
    rows: list[list[str]]
    marked: set[tuple[int, int]] = field(default_factory=set)  # Cells (row, column) that are only noise
    note: str = ""
    wordy: bool = False  # Holds sentences, not numbers
    titled: bool = False  # Its first column holds titles, which may take several lines
    folded: bool = False  # Shown when asked for
    keys: list[list[Any]] = field(default_factory=list)
    """What each cell is sorted by; a table without them stays in its order."""


@dataclass(frozen=True)
class Plot:
    """A figure in the page, or several of which one is shown."""

    key: str
    views: Views
    caption: str
    small: bool = False

    @property
    def kind(self) -> str:
        """The kind of figure: curves, cloud, bounds, ..., or a small one."""
        return "small" if self.small else self.key.partition("-")[0]


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    key: str
    title: str
    lead: str = ""
    plots: list[Plot] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    pictures: list[dict[str, str]] = field(default_factory=list)  # Of studies: a title and the picture as a data URI

    @property
    def holds_something(self) -> bool:
        """True if there is a figure, a table or a picture in it."""
        return bool(self.plots or self.tables or self.pictures)

"""What a section of the page is made of: figures, tables and a sentence on how to read them."""

from dataclasses import dataclass, field

from rankscope.figures.description import Chart
from rankscope.report.tables import Table

Views = list[tuple[str, Chart]]


@dataclass(frozen=True)
class Plot:
    """A figure in the page, or several of which one is shown."""

    key: str
    views: Views
    caption: str
    small: bool = False

    @property
    def kind(self) -> str:
        """Which of the figures of a run it is: curves, cloud, bounds, ..., or a small one."""
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
    pictures: list[dict[str, str]] = field(default_factory=list)
    """Of studies: a title and the picture as a data URI."""

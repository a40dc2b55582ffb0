"""What a decomposition shows of itself: a card in a notebook, a few lines in a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import polars as pl

from rankscope.cards import card, counted, lines
from rankscope.paths.views import LengthView, counted_paths, length_views

if TYPE_CHECKING:
    from rankscope.figures.matplotlib import Figure

HEADINGS = ("length", "paths", "share", "from biases", "res / norm")


def lengths_title(lengths: Sequence[LengthView], samples: int, closure: float) -> str:
    """How many paths there are, and that they add up."""
    paths = counted_paths(sum(view.paths for view in lengths))
    return (
        f"ByLength: {paths} paths of {counted(len(lengths), 'length')}, {counted(samples, 'sample')}, "
        f"closure {closure:.0e}"
    )


def lengths_repr(lengths: Sequence[LengthView], samples: int, closure: float) -> str:
    """The number of paths and the share of each length, as text."""
    rows = [
        [f"length {view.length}", view.cells["paths"], f"share {view.cells['share']}"] for view in lengths
    ]
    return lines(lengths_title(lengths, samples, closure), rows)


def lengths_card(table: pl.DataFrame, closure: float, title: str | None = None) -> str:
    """Shares and residuals by length."""
    views = length_views(table)
    rows = [[view.cells[heading] for heading in HEADINGS] for view in views]
    title = title or lengths_title(views, table["sample"].n_unique(), closure)
    note = f"Mean over samples. The parts add up to the output within {closure:.0e} of it."

    def draw() -> "Figure":
        from rankscope.figures.plot import plot
        from rankscope.paths.figures import lengths_chart

        return plot(lengths_chart(table))

    return card(title, draw, HEADINGS, rows, [note])

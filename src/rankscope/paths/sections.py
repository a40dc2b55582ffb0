"""What a decomposition is shown as: which lengths of paths carry the output, and what each head does."""

import polars as pl

from rankscope.paths.figures import heads_chart, lengths_chart
from rankscope.paths.views import length_views
from rankscope.results import Plot, Section, Table, sentence

HEADINGS = ("length", "paths", "share", "from biases", "res / norm")


def lengths_overview(title: str, table: pl.DataFrame, closure: float) -> Section:
    """A few columns by length, and the figure."""
    rows = [[view.cells[heading] for heading in HEADINGS] for view in length_views(table)]
    note = f"Mean over samples. The parts add up to the output within {closure:.0e} of it."
    return Section(title, "", [Plot("lengths", [("", lengths_chart(table))])], [Table("", HEADINGS, rows, note=note)])


def lengths_section(table: pl.DataFrame, closure: float | None) -> Section:
    """Shares and residuals by length, of the table of `ByLength`."""
    adds = "" if closure is None else sentence("paths", "closure", closure=closure)
    plot = Plot("lengths", [("", lengths_chart(table))], f"{sentence('paths', 'caption')}{adds}")
    return Section("Which paths carry the output", sentence("paths", "lead"), [plot], key="paths")


def heads_section(table: pl.DataFrame) -> Section:
    """What each head does, of the table of `Decomposition.by_head`."""
    names = ("contraction", "averaging", "share", "residual_share")
    views = [(name.replace("_", " "), heads_chart(table, name)) for name in names]
    plot = Plot("heads", views, sentence("heads", "caption"))
    return Section("What each head does", plots=[plot], key="heads")

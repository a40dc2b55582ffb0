"""What a decomposition is shown as: which lengths of paths carry the output, and what each head does."""

import polars as pl

from rankscope.paths.figures import heads_chart, lengths_chart
from rankscope.paths.views import head_means, length_views
from rankscope.results import Plot, Section, Table, sentence

HEADINGS = ("length", "paths", "share", "from biases", "norm", "res / norm")
SHOWN = {"share": "share", "of residual": "residual_share", "contraction": "contraction", "averaging": "averaging",
         "dobrushin": "dobrushin"}  # fmt: skip
"""Headings of the table of heads, and the column that each is of."""


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
    return Section("What each head does", plots=[plot], tables=[heads_table(table)], key="heads")


def heads_table(table: pl.DataFrame) -> Table:
    """The heads through which most of the output passes, and those that average most."""
    means = head_means(table)
    carrying = means.sort(pl.col("share").abs(), descending=True, nulls_last=True).head(5)
    averaging = means.filter(pl.col("averaging").is_finite()).sort("averaging").head(3)
    rows = [
        [str(row["layer"]), str(row["head"]),
         *("–" if row[name] is None else f"{row[name]:{'+' if 'share' in name else ''}.3f}" for name in SHOWN.values())]
        for row in pl.concat([carrying, averaging]).iter_rows(named=True)
    ]  # fmt: skip
    note = sentence("heads", "table", carrying=carrying.height)
    return Table("Heads, mean over samples", ["layer", "head", *SHOWN], rows, note=note, spare=["contraction"])

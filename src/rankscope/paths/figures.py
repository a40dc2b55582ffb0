"""What a decomposition says, as every output shows it: views, figures and sections of lengths, heads, single paths.

`ByLength`, `Decomposition`, `rankscope paths`, the report and the explorer show what is described here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import polars as pl

from rankscope import figures as fig
from rankscope.errors import MetricError, require_one_of
from rankscope.figures import evenly, power
from rankscope.profiles import geometric
from rankscope.results import Plot, Section, Table, sentence

HEAD = ("norm", "share", "residual_share", "contraction", "averaging", "dobrushin")


@dataclass(frozen=True)
class LengthView:
    """All paths of one length, means over samples."""

    length: int
    paths: int  # those that start at the embedding
    bias_paths: int
    share: float  # of the output, of what starts at the embedding
    from_biases: float
    share_of_all: float
    norm: float
    bias_norm: float
    log10_residual: float  # of the relative residual of the terms' sum, the geometric mean without zeros, as in curves
    noise: bool  # every sample's residual lies at its floor

    @property
    def cells(self) -> dict[str, str]:
        """The row of a table."""
        nonzero, biased = self.norm > 0, self.bias_norm > 0
        residual = f"{power(self.log10_residual)}{' ○' if self.noise else ''}"
        return {
            "length": str(self.length),
            "paths": counted_paths(self.paths),
            "share": f"{self.share:+z.3f}" if nonzero else "–",
            "from biases": f"{self.from_biases:+z.3f}" if biased else "",
            "norm": power(math.log10(self.norm)) if nonzero else "–",
            "res / norm": residual if nonzero else "–",
        }


def length_views(table: pl.DataFrame) -> list[LengthView]:
    """One view per length, from `ByLength.table`."""
    means = table.group_by("length", "start").agg(
        pl.col("share", "norm").mean().fill_null(math.nan), pl.col("paths").first(),
        (pl.col("below_floor") & pl.col("relative_residual").is_not_nan()).all(), pl.col("relative_residual").log10(),
    )  # fmt: skip
    rows = {(row["length"], row["start"]): row for row in means.iter_rows(named=True)}
    nan = math.nan
    none = {"share": nan, "norm": 0.0, "paths": "0", "below_floor": False, "relative_residual": [nan]}
    views = []
    for length in sorted({length for length, _ in rows}):
        starts = ("embedding", "bias", "all")
        from_embedding, bias, both = (rows.get((length, start), none) for start in starts)
        residual = float(geometric(np.array(from_embedding["relative_residual"], dtype=float)))
        views.append(LengthView(
            length, int(from_embedding["paths"]), int(bias["paths"]), from_embedding["share"], bias["share"],
            both["share"], from_embedding["norm"], bias["norm"], residual, from_embedding["below_floor"],
        ))  # fmt: skip
    return views


def head_means(table: pl.DataFrame) -> pl.DataFrame:
    """`Decomposition.by_head()`, means over the samples that have a number; null where none has."""
    return table.group_by("layer", "head").agg(pl.col(*HEAD).fill_nan(None).mean()).sort("layer", "head")


def carried(lengths: Sequence[LengthView]) -> str:
    """Which length carries most of the output."""
    finite = [view for view in lengths if math.isfinite(view.share_of_all)]
    if not finite:
        return ""
    total = sum(view.paths for view in lengths)
    if not total:
        return "No path leads from the text to the output: what comes out starts at biases."
    largest = max(finite, key=lambda view: view.share_of_all)
    heads = {0: "no head", 1: "one head"}.get(largest.length, f"{largest.length} heads")
    what = "most of the output" if largest.share_of_all > 0.5 else "more of the output than any other length"
    share = f"{largest.share_of_all:.0%}" if largest.share_of_all < 10 else f"{largest.share_of_all:.3g} times"
    above = " It is more than all of it since other paths take some back: the shares of all add up to 100%."
    over = above if largest.share_of_all > 1.005 else ""
    return f"Of {counted_paths(total)} paths those through {heads} carry {what}: {share} of it.{over}"


def counted_paths(count: int) -> str:
    """A whole number of any size, in little room.

    >>> counted_paths(2160), counted_paths(13**12)
    ('2,160', '2.3e+13')
    """
    return f"{count:,}" if count < 10**12 else power(math.log10(count))


STARTS = {"embedding": ("from the embedding", 0), "bias": ("from biases", 4)}
"""Where paths start, in words, and the number of their colour."""
HEADS = {
    "contraction": "contraction: µ of a head's output over µ of its input",
    "averaging": "averaging: contraction without the head's weights",
    "dobrushin": "Dobrushin's coefficient of a head's attention",
    "share": "share of the output that passes through a head",
    "residual_share": "share of the output's residual that passes through a head",
}
"""Columns of `Decomposition.by_head`, and what each is."""
LABELLED = 400  # heads up to which each has its number written into it
RESIDUAL = fig.Formula("‖res T‖₁,∞ / ‖T‖₁,∞", r"\|\mathrm{res}\,T\|_{1,\infty}\,/\,\|T\|_{1,\infty}")
LENGTH = "length of the path: heads in it"


def lengths_chart(table: pl.DataFrame) -> fig.Chart:
    """Paths by their length. Left: the share of the output, apart by where paths start. Right: the relative residual of
    the sum of each length's terms, a mark a sample, hollow where it is noise. `table` is `ByLength.table`."""
    views = length_views(table)
    rows = table.filter(pl.col("start") != "all")
    starts = {
        "embedding": [(view.share, view.paths, view.norm) for view in views],
        "bias": [(view.from_biases, view.bias_paths, view.bias_norm) for view in views],
    }
    lengths = [view.length for view in views]
    bars = []
    for start, columns in starts.items():
        name, colour = STARTS[start]
        hover: list[fig.Hover] = [
            (f"length {length}, {name}\n{counted_paths(paths)} path{'s' * (paths != 1)}\n",
             _percent(share, "+.1%"), " of the output")
            for length, (share, paths, _) in zip(lengths, columns, strict=True)
        ]  # fmt: skip
        if any(norm > 0 for *_, norm in columns):
            shares = [share for share, *_ in columns]
            bars.append(fig.Bars(lengths, shares, fig.line_colour(colour), name, hover))
    samples = rows.filter(
        pl.col("start") == "embedding", pl.col("norm") > 0, pl.col("relative_residual") > 0
    ).with_columns(pl.col("relative_residual").log10().alias("log10"))
    means = [view for view in views if math.isfinite(view.log10_residual)]
    logs = [view.log10_residual for view in means]
    line = fig.Line([view.length for view in means], logs, fig.line_colour(0), width=1.6)
    last = max(lengths, default=0)
    counts = {float(length): _count(views[length].paths) for length in evenly(range(len(views)), 13)}
    return fig.Chart(
        [
            fig.Panel(fig.Axis(LENGTH, last=last, range=(-0.6, last + 0.6)),
                  fig.Axis("share of the output", percent=True), bars, "what the paths of a length carry",
                  counts=counts),
            fig.Panel(fig.Axis(LENGTH, last=last), fig.Axis(RESIDUAL, fig.Powers(samples["log10"].to_list())),
                  [line, _samples(samples, 0)], "how uniform their sum T is"),
        ],
        rows.to_dict(as_series=False),
        "Share of the output by length of the path: "
        + ", ".join(f"{view.length}: {_percent(view.share, '.0%')}" for view in views) + ".",
    )  # fmt: skip


def single_paths_chart(residuals: pl.DataFrame) -> fig.Chart:
    """The relative residual of single paths against their length, and its median; hollow where it is noise.
    `residuals` is `Decomposition.residuals()`."""
    known = residuals.filter(pl.col("log10").is_finite())
    middle = known.group_by("length").agg(pl.col("log10").median()).sort("length")
    line = fig.Line(middle["length"].to_list(), middle["log10"].to_list(), fig.line_colour(1), width=1.6)
    last = int(residuals["length"].to_numpy().max(initial=0))
    return fig.Chart(
        [fig.Panel(
            fig.Axis(LENGTH, last=last), fig.Axis(RESIDUAL, fig.Powers(known["log10"].to_list())),
            [_samples(known, 1), line], f"single paths, {residuals['arithmetic'][0]} arithmetic",
        )],
        residuals.to_dict(as_series=False), "The relative residual of single paths by their length.",
    )  # fmt: skip


def _samples(rows: pl.DataFrame, index: int) -> fig.Points:
    hover: list[fig.Hover] = [
        (f"length {length}, sample {sample}\n", power(k), "\nat the floor: rounding noise" if noise and k == k else "")
        for length, sample, k, noise in rows.select("length", "sample", "log10", "below_floor").iter_rows()
    ]
    colour, hollow = fig.line_colour(index), rows["below_floor"].to_numpy().astype(bool)
    return fig.Points(rows["length"].to_list(), rows["log10"].to_list(), colour, hollow=hollow, hover=hover)


def heads_chart(table: pl.DataFrame, column: str = "contraction") -> fig.Chart:
    """The heads as a map, layer by head, mean over samples: one column of `Decomposition.by_head()`.

    Shares have signs: blue adds to the output, orange takes away from it.
    """
    require_one_of("column", column, HEADS, MetricError)
    means = head_means(table)
    layers, heads = (means[name].unique().sort().to_list() for name in ("layer", "head"))
    rows = {(row["layer"], row["head"]): row for row in means.iter_rows(named=True)}
    places = [[(layer, head) for head in heads] for layer in layers]  # of a damaged table some are missing
    grid = np.array([[rows.get(cell, {}).get(column) for cell in row] for row in places], dtype=float)
    sizes = np.abs(grid[np.isfinite(grid)])
    signed, limit = "share" in column, float(sizes.max(initial=0.0)) or 1.0
    cells = fig.Heatmap(
        heads, layers, grid, range=(-limit if signed else 0.0, limit), signed=signed,
        numbers=len(layers) * len(heads) <= LABELLED,
        hover=[[_head(rows[cell]) if cell in rows else ("", "", "") for cell in row] for row in places],
    )  # fmt: skip
    least, most = (sizes.min(), sizes.max()) if len(sizes) else (math.nan, math.nan)
    return fig.Chart(
        [fig.Panel(
            fig.Axis("head", last=len(heads) - 1, range=(-0.5, len(heads) - 0.5), grid=False),
            fig.Axis("layer", last=layers[-1], range=(layers[0] - 0.5, layers[-1] + 0.5), grid=False),
            [cells], HEADS[column],
        )],
        means.to_dict(as_series=False),
        f"{HEADS[column].capitalize()}, for {len(layers)} layers of {len(heads)} heads; from {least:.3g} to "
        f"{most:.3g}.",
        height=max(240, min(720, 80 + 34 * len(layers))), size=(5.4, 4.0),
    )  # fmt: skip


def _head(head: dict[str, Any]) -> fig.Hover:
    """What a head does, in words; what has no number is passed over."""
    before = f"layer {head['layer']}, head {head['head']}"
    if head["norm"] == 0:
        return f"{before}\ndoes not speak", "", ""
    contraction, after = "", []
    if head["contraction"] is not None:
        before, contraction = f"{before}\nits output varies ", f"{head['contraction']:.3g}"
        after.append(" times as much as its input")
    if head["averaging"] is not None and head["dobrushin"] is not None:
        after.append(f"its averaging alone: {head['averaging']:.3g} (Dobrushin {head['dobrushin']:.3g})")
    if head["share"] is not None:
        after.append(f"{head['share']:+.1%} of the output passes through it")
    if head["residual_share"] is not None:
        does = "holds tokens apart" if head["residual_share"] > 0 else "draws tokens together"
        after.append(f"{head['residual_share']:+.1%} of the output's residual: {does}")
    return before, contraction, "\n".join(after if contraction else ["", *after])


def _percent(share: float, form: str) -> str:
    return f"{share:{form}}" if math.isfinite(share) else "no number"


def _count(index: int) -> str:
    """A whole number in little room.

    >>> _count(144), _count(23298085122481)
    ('144', '2.3e13')
    """
    return str(index) if index < 10**4 else f"{Decimal(index):.1e}".replace("+", "")


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

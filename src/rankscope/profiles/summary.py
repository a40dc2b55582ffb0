"""`Summary`: what many excerpts have in common.

One row per variant, arithmetic, layer, head and metric, with the statistics over excerpts:

    count · mean · sd · least · q05 · q25 · q50 · q75 · q95 · most             of the value
    the same, named log10_...                                                 of its log10
    zeros · not_finite · below_floor · floor

A log10 does not underflow where its value does. An excerpt whose value is exactly zero has no finite log10:
`zeros` counts these, and they stay out of `log10_mean`, though not out of quantiles. All quantiles are exact.
An excerpt that overflowed has no value at all: `not_finite` counts these. `below_floor` is the share of
values that are rounding noise, `floor` the mean floor beneath them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankscope.errors import MetricError, one_of
from rankscope.profiles.profile import only
from rankscope.profiles.statistics import QUANTILES
from rankscope.profiles.views import CurveView, of_quantiles
from rankscope.runs import Manifest, tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROW = ["variant", "arithmetic", "layer", "head", "metric"]
STATISTICS = ["count", "mean", "sd", "least", *QUANTILES, "most"]
LOGS = [f"log10_{name}" for name in STATISTICS]
SCHEMA: dict[str, type[pl.DataType]] = {
    "variant": pl.String,
    "arithmetic": pl.String,
    "layer": pl.Int64,
    "head": pl.Int64,
    "metric": pl.String,
    **{name: pl.Int64 if name.endswith("count") else pl.Float64 for name in [*STATISTICS, *LOGS]},
    "zeros": pl.Int64,
    "not_finite": pl.Int64,
    "below_floor": pl.Float64,
    "floor": pl.Float64,
}


@dataclass(frozen=True, eq=False, repr=False)
class Summary:
    """Statistics over excerpts of one or more networks, layer by layer."""

    table: pl.DataFrame
    manifest: Manifest

    def __repr__(self) -> str:
        from rankscope.profiles.card import curves_repr

        return curves_repr("Summary", (self.excerpts, "excerpt"), self.views())

    def _repr_html_(self) -> str:
        """For notebooks: the first metric as a figure and a table."""
        from rankscope.profiles.card import curves_card

        return curves_card("Summary", (self.excerpts, "excerpt"), self.views(), len(self.metrics))

    @property
    def excerpts(self) -> int:
        """How many were measured."""
        return self.manifest.excerpts or 0

    @property
    def variants(self) -> list[str]:
        """The networks in the table, in order."""
        return self.table["variant"].unique(maintain_order=True).to_list()

    @property
    def arithmetics(self) -> list[str]:
        """The arithmetics in the table, in order."""
        return self.table["arithmetic"].unique(maintain_order=True).to_list()

    @property
    def metrics(self) -> list[str]:
        """The metrics in the table, in the order they were asked for."""
        found = self.table["metric"].unique(maintain_order=True).to_list()
        asked = self.manifest.networks[0].metrics
        return sorted(found, key=lambda name: asked.index(name) if name in asked else len(asked))

    def lines(self, metric: str) -> list[tuple[str, str]]:
        """The (variant, arithmetic) pairs that have this metric, in order."""
        rows = self.table.filter(metric=only("metric", metric, self.metrics))
        return rows.select("variant", "arithmetic").unique(maintain_order=True).rows()

    def curve(
        self, metric: str, column: str = "q50", *, variant: str | None = None, arithmetic: str | None = None
    ) -> Float[Tensor, " layer"]:
        """A statistic by layer, the median if none is named; of attention and heads its mean over heads, NaN
        at layer 0."""
        if column not in SCHEMA or column in ROW:
            raise MetricError(one_of("column", column, [name for name in SCHEMA if name not in ROW]))
        rows = self.table.filter(
            metric=only("metric", metric, self.metrics),
            variant=only("variant", variant, self.variants),
            arithmetic=only("arithmetic", arithmetic, self.arithmetics),
        )
        each = pl.col(column).cast(pl.Float64)
        if column.startswith("log10_q"):  # a head whose median is zero has no log, unless it is all heads
            each = pl.when((each == -torch.inf).all()).then(each).otherwise(each.replace(-torch.inf, None))
        means = rows.group_by("layer", maintain_order=True).agg(each.mean())
        curve = torch.full((1 + max(means["layer"].to_list()),), torch.nan, dtype=torch.float64)
        curve[means["layer"].to_list()] = torch.tensor(
            means[column].fill_null(torch.nan).to_list(), dtype=torch.float64
        )
        return curve

    def views(self, metric: str | None = None) -> list[CurveView]:
        """What each line of a metric (the first, if left out) says: the median, with bands of nine tenths and
        of a half of the excerpts."""
        found, name = [], metric or self.metrics[0]
        for variant, arithmetic in self.lines(name):
            chosen = {"variant": variant, "arithmetic": arithmetic}
            columns = [*QUANTILES, *(f"log10_{each}" for each in QUANTILES), "floor"]
            curves = {each: self.curve(name, each, **chosen).numpy() for each in columns}
            label = variant if len(self.arithmetics) == 1 else f"{variant}, {arithmetic}"
            noise = self.at_floor(name, **chosen).numpy()
            found.append(of_quantiles(name, variant, arithmetic, label, curves, noise, self.excerpts))
        return found

    def at_floor(
        self, metric: str, *, variant: str | None = None, arithmetic: str | None = None
    ) -> Bool[Tensor, " layer"]:
        """By layer: whether the median is noise, as at least half of the values lie at their floor."""
        return self.curve(metric, "below_floor", variant=variant, arithmetic=arithmetic) >= 0.5

    def plot(self, metric: str | None = None, *, log: bool | None = None) -> "Figure":
        """The median by layer (of the first metric, if left out), with bands of a half and of nine tenths of
        the excerpts, floors drawn; `log=None` decides by range."""
        from rankscope.profiles.plot import plot_curves

        return plot_curves(self.views(metric), log)

    def save(self, path: str | Path) -> Path:
        """Write one Parquet file, manifest inside, atomically."""
        return tables.write(path, self.table, self.manifest)

    @classmethod
    def read(cls, path: str | Path) -> "Summary":
        """The summary that `save` wrote."""
        return cls(*tables.read(path, SCHEMA, "Summary"))

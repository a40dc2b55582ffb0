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

from collections.abc import Mapping
from typing import Any

import polars as pl
import torch
from torch import Tensor

from rankscope.errors import MetricError, one_of
from rankscope.profiles.corpus_statistics import QUANTILES
from rankscope.profiles.curves import Curves
from rankscope.profiles.profile import KEYS
from rankscope.profiles.profile import SCHEMA as RAW
from rankscope.profiles.views import CurveView, of_quantiles
from rankscope.shapes import Bool, Float

ROW = [name for name in KEYS if name != "sample"]
STATISTICS = ["count", "mean", "sd", "least", *QUANTILES, "most"]
LOGS = [f"log10_{name}" for name in STATISTICS]
SCHEMA: dict[str, type[pl.DataType]] = {
    **{name: RAW[name] for name in ROW},
    **{name: pl.Int64 if name.endswith("count") else pl.Float64 for name in [*STATISTICS, *LOGS]},
    "zeros": pl.Int64,
    "not_finite": pl.Int64,
    "below_floor": pl.Float64,
    "floor": pl.Float64,
}


class Summary(Curves):
    """Statistics over excerpts of one or more networks, layer by layer."""

    schema = SCHEMA

    @property
    def excerpts(self) -> int:
        """How many were measured."""
        return self.manifest.excerpts or 0

    @property
    def _many(self) -> tuple[int, str]:
        return self.excerpts, "excerpt"

    def curve(
        self, metric: str, column: str = "q50", *, variant: str | None = None, arithmetic: str | None = None
    ) -> Float[Tensor, " layer"]:
        """A statistic by layer, the median if none is named; of attention and heads its mean over heads, NaN
        at layer 0."""
        if column not in SCHEMA or column in ROW:
            raise MetricError(one_of("column", column, [name for name in SCHEMA if name not in ROW]))
        rows = self.rows(metric, variant=variant, arithmetic=arithmetic)
        each = pl.col(column).cast(pl.Float64)
        if column.startswith("log10_q"):  # a head whose median is zero has no log, unless it is all heads
            each = pl.when((each == -torch.inf).all()).then(each).otherwise(each.replace(-torch.inf, None))
        means = rows.group_by("layer", maintain_order=True).agg(each.mean())
        curve = torch.full((1 + max(means["layer"].to_list()),), torch.nan, dtype=torch.float64)
        curve[means["layer"].to_list()] = torch.tensor(
            means[column].fill_null(torch.nan).to_list(), dtype=torch.float64
        )
        return curve

    def _view(self, metric: str, name: str, label: str, chosen: Mapping[str, Any]) -> CurveView:
        columns = [*QUANTILES, *(f"log10_{each}" for each in QUANTILES), "floor"]
        curves = {each: self.curve(metric, each, **chosen).numpy() for each in columns}
        noise = self.at_floor(metric, **chosen).numpy()
        return of_quantiles(metric, name, chosen["arithmetic"], label, curves, noise, self.excerpts)

    def at_floor(
        self, metric: str, *, variant: str | None = None, arithmetic: str | None = None
    ) -> Bool[Tensor, " layer"]:
        """By layer: whether the median is noise, as at least half of the values lie at their floor."""
        return self.curve(metric, "below_floor", variant=variant, arithmetic=arithmetic) >= 0.5

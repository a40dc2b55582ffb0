"""`Summary`: what many excerpts have in common.

One row per variant, arithmetic, layer, head and metric, with the statistics over excerpts:

    count · mean · sd · least · q05 · q25 · q50 · q75 · q95 · most             of the value
    the same, named log10_...                                                 of its log10
    zeros · not_finite · below_floor · floor

A log10 does not underflow where its value does. An excerpt whose value is exactly zero has no finite log10:
`zeros` counts these, and they stay out of `log10_mean`, though not out of quantiles. All quantiles are exact.
An excerpt that overflowed has no value at all: `not_finite` counts these. `below_floor` is the share of
values that are rounding noise, `floor` the mean floor beneath them.

Made by `corpus_rows.py`, a few (variant, metric, layer, head) at a time (`statistics_of`), so that memory
does not grow with a corpus.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import polars as pl
import torch
from torch import Tensor

from rankscope.errors import MetricError, one_of
from rankscope.figures import power
from rankscope.profiles.curves import Curves
from rankscope.profiles.profile import KEYS
from rankscope.profiles.profile import SCHEMA as RAW
from rankscope.profiles.views import CurveView, LineName, of_quantiles
from rankscope.results import Table
from rankscope.shapes import Bool, Float

QUANTILES = {"q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}

Numbers = Float[np.ndarray, "row sample"]
Column = Float[np.ndarray, " row"]


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

    kind = "summary"
    schemas: ClassVar = {"summary": SCHEMA}

    @property
    def excerpts(self) -> int:
        """How many excerpts were measured."""
        return self.manifest.excerpts or 0

    @property
    def measured(self) -> tuple[int, str]:
        """How many things were measured, and what they are."""
        return self.excerpts, "excerpt"

    def spread(self, metric: str) -> list[Table]:
        """How excerpts differ at the last layer: quantiles from their logs, which do not underflow."""
        rows = []
        for view in self.views(metric):
            (low, high), (lower, upper) = view.log10_bands
            quantiles = [power(float(curve[-1])) for curve in (low, lower, view.log10, upper, high)]
            mean, sd, noise, count = (
                float(self.curve(metric, name, variant=view.variant, arithmetic=view.arithmetic)[-1])
                for name in ("mean", "sd", "below_floor", "count")
            )
            rows.append([view.label, *quantiles, f"{mean:.3g}", f"{sd:.3g}", f"{noise:.0%}", f"{count:.0f}"])
        headings = ["5 %", "25 %", "median", "75 %", "95 %", "mean", "sd", "at floor", "excerpts"]
        title = f"{metric} over excerpts, at the last layer"
        return [Table(title, ["variant", *headings], rows, spare=["at floor", "mean", "sd", "5 %", "95 %"])]

    def curve(
        self, metric: str, column: str = "q50", *, variant: str | None = None, arithmetic: str | None = None
    ) -> Float[Tensor, " layer"]:
        """A statistic by layer, the median if left out; of attention and heads its mean over heads, NaN at layer 0."""
        if column not in SCHEMA or column in ROW:
            raise MetricError(one_of("column", column, [name for name in SCHEMA if name not in ROW]), subject="column")
        rows = self.rows(metric, variant=variant, arithmetic=arithmetic)
        value = pl.col(column).cast(pl.Float64)
        if column.startswith("log10_q"):  # a head whose median is zero has no log, unless it is all heads
            value = pl.when((value == -torch.inf).all()).then(value).otherwise(value.replace(-torch.inf, None))
        means = rows.group_by("layer", maintain_order=True).agg(value.mean())
        curve = torch.full((1 + max(means["layer"].to_list()),), torch.nan, dtype=torch.float64)
        values = means[column].fill_null(torch.nan).to_list()
        curve[means["layer"].to_list()] = torch.tensor(values, dtype=torch.float64)
        return curve

    def _view(self, line: LineName, chosen: Mapping[str, Any]) -> CurveView:
        columns = [*QUANTILES, *(f"log10_{name}" for name in QUANTILES), "floor"]
        curves = {column: self.curve(line.metric, column, **chosen).numpy() for column in columns}
        return of_quantiles(line, curves, self.at_floor(line.metric, **chosen).numpy(), self.excerpts)

    def at_floor(
        self, metric: str, *, variant: str | None = None, arithmetic: str | None = None
    ) -> Bool[Tensor, " layer"]:
        """By layer: whether the median is noise, as at least half of the values lie at their floor."""
        return self.curve(metric, "below_floor", variant=variant, arithmetic=arithmetic) >= 0.5


def statistics_of(numbers: Numbers, *, logs: bool = False) -> dict[str, Column]:
    """Count, mean, standard deviation `sd` (with n - 1) and range of the finite numbers in each row, NaN
    where there are none (of fewer than two, for `sd`), and the quantiles of all that are not NaN."""
    finite = np.isfinite(numbers)
    count = finite.sum(1).astype(float)
    divisor = np.maximum(count, 1.0)[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        # Scaled before they are summed: the mean of numbers in range is in range.
        mean = (np.where(finite, numbers, 0.0) / divisor).sum(1)
        mean += (np.where(finite, numbers - mean[:, None], 0.0) / divisor).sum(1)  # what rounding left of it
        squares = np.square(np.where(finite, numbers - mean[:, None], 0.0)).sum(1)
        sd = np.sqrt(np.where(count > 1, squares, np.nan) / np.maximum(count - 1, 1.0))
    known = {
        "mean": mean,
        "least": np.where(finite, numbers, np.inf).min(1, initial=np.inf),
        "most": np.where(finite, numbers, -np.inf).max(1, initial=-np.inf),
    }
    ordered = np.sort(numbers, axis=1)  # NaN last
    present = (~np.isnan(ordered)).sum(1)
    return {
        "count": count,
        "sd": sd,
        **{name: np.where(count > 0, column, np.nan) for name, column in known.items()},
        **{name: quantile(ordered, present, share, logs=logs) for name, share in QUANTILES.items()},
    }


def quantile(ordered: Numbers, count: np.ndarray, share: float, *, logs: bool = False) -> Column:
    """The quantile of each row's first `count` numbers, which are in order: between neighbours, linear.

    Where a neighbour is infinite there is no between, and the lower one is taken. Of logs, -inf is that of an
    exact zero: at t of the way from it to the log of v lies the log of t v, as among the values themselves.
    """
    if not ordered.shape[1]:
        return np.full(len(ordered), np.nan)
    last = np.maximum(count - 1, 0)
    position = share * last
    low = np.floor(position).astype(int)
    rows = np.arange(len(ordered))
    below, above = ordered[rows, low], ordered[rows, np.minimum(low + 1, last)]
    part = position - low
    exact: Bool[np.ndarray, " row"] = (part == 0) | (below == above)
    exact |= ~np.isfinite(below) | ~np.isfinite(above)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        values = np.where(exact, below, below * (1 - part) + above * part)
        if logs:
            after_zero = np.isneginf(below) & np.isfinite(above) & (part > 0)
            values = np.where(after_zero, above + np.log10(part), values)
    return np.where(count > 0, values, np.nan)

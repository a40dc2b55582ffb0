"""`Summary`: what many excerpts have in common.

One row per variant, arithmetic, layer, head and metric, with the statistics over excerpts:

    count · mean · sd · least · q05 · q25 · q50 · q75 · q95 · most             of the value
    the same, named log10_...                                                 of its log10
    zeros · not_finite · below_floor · floor

A log10 does not underflow where its value does. An excerpt whose value is exactly zero has no finite log10:
`zeros` counts these, and they stay out of `log10_mean`, though not out of quantiles. All quantiles are exact.
An excerpt that overflowed has no value at all: `not_finite` counts these. `below_floor` is the share of
values that are rounding noise, `floor` the mean floor beneath them.

Made by `CorpusRows`, a few (variant, metric, layer, head) at a time (`statistics_of`), so that memory does not grow
with a corpus. It is filled by `corpus.py`, a profile at a time, and writes rows by chunks into a run folder. A chunk
holds whole excerpts, ordered by what a row is of (variant, arithmetic, layer, head, metric) and then by excerpt: one
kind of row stands together. What is waiting to be written is in memory, the rest on disk.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import polars as pl
import torch
from torch import Tensor

from rankscope.errors import MetricError, require_one_of
from rankscope.figures import power
from rankscope.profiles.profile import KEYS, NUMBERS, Curves, Profile
from rankscope.profiles.profile import SCHEMA as RAW
from rankscope.profiles.views import CurveView, LineName, of_quantiles
from rankscope.results import Table
from rankscope.runs import Manifest, Store
from rankscope.shapes import Bool, Float

ENTRY, NAME = "corpus", "rows"
CELLS = 2**18  # numbers of each column in memory at once, while statistics are computed
MOST = 2**18  # rows that wait in memory at most
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
        require_one_of("column", column, [name for name in SCHEMA if name not in ROW], MetricError)
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

    def at_floor(self, metric: str, **chosen: str | None) -> Bool[Tensor, " layer"]:
        """By layer: whether the median is noise, as at least half of the values lie at their floor; the variant and the
        arithmetic are `chosen` as in `curve`."""
        return self.curve(metric, "below_floor", **chosen) >= 0.5


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


class CorpusRows:
    """The rows of all excerpts so far, those of earlier runs included.

    >>> import torch
    >>> from rankscope.nets import Architecture, Transformer
    >>> from rankscope.profiles import measure
    >>> net = Transformer.random(Architecture(layers=2, width=8, heads=2))
    >>> gathered = CorpusRows()
    >>> for _ in range(3):
    ...     gathered.add(measure(net, torch.randn(4, 5, 8), metrics="mu"))
    >>> gathered.summary().curve("mu", "count").tolist()
    [12.0, 12.0, 12.0]
    """

    def __init__(
        self, store: Store | None = None, before: Sequence[Manifest] = (), key: dict[str, Any] | None = None
    ) -> None:
        """Without a store all rows are kept in memory; `before` are the manifests of chunks that it holds already."""
        self.store, self.key = store, key
        self.excerpts = sum(manifest.samples or 0 for manifest in before)
        self.manifest: Manifest | None = None
        self.kinds = pl.DataFrame(schema={name: SCHEMA[name] for name in ROW})  # what each excerpt has a row of
        self._waiting: list[pl.DataFrame] = []
        self._checked: Manifest | None = None  # what those that wait found about themselves
        for manifest in before:
            self.manifest = with_checks(self.manifest, replace(manifest, samples=None, key=None, more={}))
        if store is not None and before:
            first = store.folder / store.run.chunks(NAME)[0]
            self.kinds = pl.read_parquet(first, columns=ROW).unique(maintain_order=True)

    @property
    def waiting(self) -> int:
        """Rows that are not on disk yet."""
        return sum(map(len, self._waiting))

    def add(self, profile: Profile) -> None:
        """Take in the samples of a profile; an empty one is skipped. Each sample must have every kind of row (`ROW`)
        that the first profile had, in an earlier run if there was one, and no other: else `MetricError`."""
        if not len(profile.table):
            return
        if not self.excerpts:
            self.kinds = profile.table.select(ROW).unique(maintain_order=True)
        self._waiting.append(self._placed(profile.table))
        self._checked = with_checks(self._checked, profile.manifest)
        self.manifest = with_checks(self.manifest, profile.manifest)
        self.excerpts += len(profile.table) // len(self.kinds)

    def flush(self, **state: object) -> None:
        """Write what waits as one chunk; `state` goes into its manifest."""
        if self.store is None or self._checked is None:
            return
        table = pl.concat(self._waiting).sort("kind", "sample", maintain_order=True).select(list(RAW))
        samples = len(table) // len(self.kinds)
        self.store.append(ENTRY, NAME, table, self._checked.adding(samples=samples, key=self.key, **state))
        self._waiting, self._checked = [], None

    def summary(self) -> Summary:
        """The statistics of what has come so far."""
        if self.manifest is None:
            raise MetricError("a summary must be of at least one excerpt; none was added", subject="excerpts")
        parts = []
        step = max(1, CELLS // self.excerpts)
        for first in range(0, len(self.kinds), step):
            value, log10, floor, noise = self._matrices(first, min(first + step, len(self.kinds)))
            of_values, logs = statistics_of(value), statistics_of(log10, logs=True)
            columns = {**of_values, **{f"log10_{name}": column for name, column in logs.items()}}
            columns["zeros"] = np.isneginf(log10).sum(1)
            columns["not_finite"] = self.excerpts - of_values["count"]
            columns["below_floor"] = ((noise > 0) & ~np.isnan(value)).sum(1) / np.maximum(of_values["count"], 1)
            columns["floor"] = statistics_of(floor)["mean"]
            parts.append(pl.DataFrame({name: column.astype(float) for name, column in columns.items()}))
        table = self.kinds.hstack(pl.concat(parts)).select(list(SCHEMA)).cast(pl.Schema(SCHEMA))
        return Summary(table, self.manifest.adding(excerpts=self.excerpts, key=self.key))

    def _matrices(self, first: int, last: int) -> list[Numbers]:
        """value, log10, floor and below_floor of these kinds, [kind, excerpt]."""
        matrices = [np.empty((last - first, self.excerpts)) for _ in NUMBERS]
        start = 0
        for chunk in self._chunks():
            count = len(chunk) // len(self.kinds)
            for column, matrix in zip(NUMBERS, matrices, strict=True):
                numbers = chunk[column].cast(pl.Float64).to_numpy().reshape(len(self.kinds), count)
                matrix[:, start : start + count] = numbers[first:last]
            start += count
        return matrices

    def _chunks(self) -> Iterator[pl.DataFrame]:
        if self.store is not None:
            for file in self.store.run.chunks(NAME):
                yield pl.read_parquet(self.store.folder / file, columns=NUMBERS)
        yield from self._waiting

    def _placed(self, table: pl.DataFrame) -> pl.DataFrame:
        """The rows with their kind, by kind and then by sample, numbered on from those that came before."""
        rows = table.join(self.kinds.with_row_index("kind"), on=ROW, how="left", nulls_equal=True)
        rows = rows.with_columns(pl.col("sample").rank("dense").cast(pl.Int64) - 1 + self.excerpts)
        rows = rows.sort("kind", "sample", maintain_order=True)
        expected = np.repeat(np.arange(len(self.kinds)), rows["sample"].n_unique())
        if rows["kind"].null_count() or not np.array_equal(rows["kind"], expected):
            sentence = f"a profile to add must have the {len(self.kinds)} kinds of row of the first for each sample"
            raise MetricError(f"{sentence}; this one has others: measure the same networks", subject="profile")
        return rows


def with_checks(before: Manifest | None, now: Manifest) -> Manifest:
    """One manifest for all excerpts: what each part of them found about itself, together."""
    if before is None:
        return now
    networks = []
    for network, later in zip(before.networks, now.networks, strict=True):
        first, then = network.checks, later.checks
        broken = [checks["first_layer_not_finite"] for checks in (first, then)]
        checks = {
            **first,
            "padded_tokens": first["padded_tokens"] + then["padded_tokens"],
            "largest_row_sum_defect": max(first["largest_row_sum_defect"], then["largest_row_sum_defect"]),
            "rows_sum_to_one": first["rows_sum_to_one"] and then["rows_sum_to_one"],
            "first_layer_not_finite": min((layer for layer in broken if layer is not None), default=None),
        }
        networks.append(replace(network, checks=checks))
    return replace(before, networks=tuple(networks))

"""The rows of many excerpts, written chunk by chunk into a run folder, and the `Summary` that they make.

Filled by `corpus.py`, a profile at a time; `summary.py` has the statistics.

A chunk holds whole excerpts, ordered by what a row is of (variant, arithmetic, layer, head, metric) and then
by excerpt: one kind of row stands together. What is waiting to be written is in memory, the rest on disk.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from rankscope.errors import MetricError
from rankscope.profiles.profile import NUMBERS, Profile
from rankscope.profiles.profile import SCHEMA as RAW
from rankscope.profiles.summary import ROW, SCHEMA, Numbers, Summary, statistics_of
from rankscope.runs import Manifest, Network, Store

ENTRY, NAME = "corpus", "rows"
CELLS = 2**18  # numbers of each column in memory at once, while statistics are computed
MOST = 2**18  # rows that wait in memory at most


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
    pairs = zip(before.networks, now.networks, strict=True)
    return replace(before, networks=tuple(_both(old.checks, new.checks, old) for old, new in pairs))


def _both(first: dict[str, Any], then: dict[str, Any], network: Network) -> Network:
    broken = [manifest["first_layer_not_finite"] for manifest in (first, then)]
    checks = {
        **first,
        "padded_tokens": first["padded_tokens"] + then["padded_tokens"],
        "largest_row_sum_defect": max(first["largest_row_sum_defect"], then["largest_row_sum_defect"]),
        "rows_sum_to_one": first["rows_sum_to_one"] and then["rows_sum_to_one"],
        "first_layer_not_finite": min((layer for layer in broken if layer is not None), default=None),
    }
    return replace(network, checks=checks)

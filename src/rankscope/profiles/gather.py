"""Gathering excerpts into a `Summary`, chunk by chunk, in a memory that does not grow with their number.

Means and standard deviations are of all excerpts, and so are counts and ranges. Quantiles need the values
themselves: they are exact up to `RESERVOIR` excerpts, and beyond that those of a uniform draw of so many.
"""

import json
from hashlib import blake2b
from typing import Any

import numpy as np
import polars as pl
from jaxtyping import Float

from rankscope.errors import MetricError
from rankscope.profiles.manifest import Manifest
from rankscope.profiles.moments import Moments, quantile
from rankscope.profiles.profile import Profile
from rankscope.profiles.summary import QUANTILES, ROW, SCHEMA, Summary

RESERVOIR = 4096
"""Excerpts up to which quantiles are exact; of more, they are those of so many, drawn uniformly."""


class Gatherer:
    """What a summary is made of, while excerpts come in. Its memory is `reservoir` excerpts' rows.

    >>> import torch
    >>> from rankscope.nets import Architecture, Transformer
    >>> from rankscope.profiles import measure
    >>> net, gathered = Transformer.random(Architecture(layers=2, width=8, heads=2)), Gatherer()
    >>> for _ in range(3):
    ...     gathered.add(measure(net, torch.randn(4, 5, 8), metrics="mu"))
    >>> gathered.summary().curve("mu", "count").tolist()
    [12.0, 12.0, 12.0]
    """

    def __init__(self, reservoir: int = RESERVOIR, seed: int = 0) -> None:
        if reservoir < 1:
            raise MetricError(f"reservoir must be at least 1 excerpt; got {reservoir}")
        self.reservoir, self.seed = reservoir, seed
        self.excerpts = 0
        self.manifest: Manifest = {}
        self.rows = pl.DataFrame(schema={name: SCHEMA[name] for name in ROW})

    def add(self, profile: Profile) -> None:
        """Take in the samples of a profile. Every profile must have the same rows as the first."""
        if not len(profile.table):
            return
        if not self.excerpts:
            self._begin(profile.table.select(ROW).unique(maintain_order=True))
        value, log10, floor, noise = self._matrices(profile.table)
        self._value.add(value)
        self._log10.add(log10)
        self._floor.add(floor)
        self._zeros += np.isneginf(log10).sum(0)
        self._noise += (noise > 0).sum(0)
        for number in range(len(value)):
            slot = _slot(self.excerpts + number, self.reservoir, self.seed)
            if slot is not None:
                self._kept[0, slot], self._kept[1, slot] = value[number], log10[number]
        self.excerpts += len(value)
        self.manifest = _with_checks(self.manifest, profile.manifest)

    def summary(self) -> Summary:
        """The statistics of what has come so far."""
        if not self.excerpts:
            raise MetricError("a summary must be of at least one excerpt; none was added")
        columns: dict[str, Any] = {}
        for prefix, moments, kept in (("", self._value, 0), ("log10_", self._log10, 1)):
            columns[f"{prefix}count"] = moments.count
            columns[f"{prefix}mean"] = moments.known(moments.mean)
            columns[f"{prefix}sd"] = moments.sd()
            columns[f"{prefix}least"] = moments.known(moments.least)
            columns[f"{prefix}most"] = moments.known(moments.most)
            ordered = np.sort(self._kept[kept, : min(self.excerpts, self.reservoir)], axis=0)  # NaN last
            there = (~np.isnan(ordered)).sum(0).astype(float)
            for name, share in QUANTILES.items():
                columns[f"{prefix}{name}"] = quantile(ordered, there, share)
        columns["zeros"] = self._zeros
        columns["not_finite"] = self.excerpts - self._value.count
        columns["below_floor"] = self._noise / np.maximum(self._value.count, 1)
        columns["floor"] = self._floor.known(self._floor.mean)
        statistics = pl.DataFrame({name: np.asarray(column, dtype=float) for name, column in columns.items()})
        table = self.rows.hstack(statistics).select(list(SCHEMA)).cast(pl.Schema(SCHEMA))
        exact = self.excerpts <= self.reservoir
        said = "exact" if exact else f"of {self.reservoir} excerpts drawn uniformly from {self.excerpts}"
        return Summary(table, {**self.manifest, "excerpts": self.excerpts, "quantiles": said})

    def arrays(self) -> dict[str, np.ndarray]:
        """All of it as arrays, for a checkpoint; `restored` is the inverse."""
        about = {
            "reservoir": self.reservoir,
            "seed": self.seed,
            "excerpts": self.excerpts,
            "manifest": self.manifest,
            "rows": self.rows.rows(),
        }
        return {
            "about": np.array(json.dumps(about)),
            **self._value.arrays("value"),
            **self._log10.arrays("log10"),
            **self._floor.arrays("floor"),
            "zeros": self._zeros,
            "noise": self._noise,
            "kept": self._kept[:, : min(self.excerpts, self.reservoir)],
        }

    @classmethod
    def restored(cls, arrays: dict[str, np.ndarray]) -> "Gatherer":
        """What `arrays` gave, ready for more."""
        about = json.loads(str(arrays["about"]))
        new = cls(about["reservoir"], about["seed"])
        new._begin(pl.DataFrame(about["rows"], schema={name: SCHEMA[name] for name in ROW}, orient="row"))
        new.excerpts, new.manifest = about["excerpts"], about["manifest"]
        new._value = Moments.of_arrays(arrays, "value")
        new._log10 = Moments.of_arrays(arrays, "log10")
        new._floor = Moments.of_arrays(arrays, "floor")
        new._zeros, new._noise = arrays["zeros"], arrays["noise"]
        new._kept[:, : arrays["kept"].shape[1]] = arrays["kept"]
        return new

    def _begin(self, rows: pl.DataFrame) -> None:
        self.rows = rows
        number = len(rows)
        self._value, self._log10, self._floor = (Moments.empty(number) for _ in range(3))
        self._zeros, self._noise = np.zeros(number, dtype=np.int64), np.zeros(number, dtype=np.int64)
        self._kept = np.empty((2, self.reservoir, number))
        """Value and log10 of the excerpts that were drawn."""

    def _matrices(self, table: pl.DataFrame) -> list[Float[np.ndarray, "sample row"]]:
        """value, log10, floor and below_floor as [sample, row]."""
        placed = table.join(self.rows.with_row_index("row"), on=ROW, how="left", nulls_equal=True)
        sample = placed["sample"].rank("dense").to_numpy() - 1
        shape = (int(sample.max()) + 1, len(self.rows))
        if placed["row"].null_count() or len(placed) != shape[0] * shape[1]:
            raise MetricError(
                f"a profile to add must have the {len(self.rows)} rows of the first (variant, arithmetic, "
                "layer, head, metric) for each sample; this one has others: measure the same networks"
            )
        index = (sample, placed["row"].to_numpy())
        matrices = []
        for column in ("value", "log10", "floor", "below_floor"):
            matrix = np.full(shape, np.nan)
            matrix[index] = placed[column].cast(pl.Float64).to_numpy()
            matrices.append(matrix)
        return matrices


def _slot(number: int, reservoir: int, seed: int) -> int | None:
    """Where the excerpt of that number goes, None if it is not kept (Vitter 1985, algorithm R).

    Excerpt k >= N takes a place drawn from 0..k and is kept if that is one of the N. The draw depends on the
    seed and k alone, so neither chunks nor an interruption change it.
    """
    if number < reservoir:
        return number
    digest = blake2b(number.to_bytes(8, "little"), digest_size=8, key=seed.to_bytes(8, "little"))
    place = int.from_bytes(digest.digest(), "little") % (number + 1)
    return place if place < reservoir else None


def _with_checks(before: Manifest, now: Manifest) -> Manifest:
    """One manifest for all chunks: what each found about itself, together."""
    if not before:
        return now
    networks = []
    for old, new in zip(before["networks"], now["networks"], strict=True):
        first, then = old["checks"], new["checks"]
        broken = [each["first_layer_not_finite"] for each in (first, then)]
        known = [layer for layer in broken if layer is not None]
        checks = {
            **first,
            "padded_tokens": first["padded_tokens"] + then["padded_tokens"],
            "largest_row_sum_defect": max(first["largest_row_sum_defect"], then["largest_row_sum_defect"]),
            "rows_sum_to_one": first["rows_sum_to_one"] and then["rows_sum_to_one"],
            "first_layer_not_finite": min(known) if known else None,
        }
        networks.append({**old, "checks": checks})
    return {**before, "networks": networks}

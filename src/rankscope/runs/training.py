"""A training run as it is read: what was written of it so far, by metric, layer and step.

`Monitor` writes tables that grow while it trains, `training` and `alarms`, and `training_certificates` where
they were asked for; `rankscope checkpoints` writes the same of a training that nobody watched. Reading them
needs no torch, and never waits for the writer.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from rankscope.errors import FileError, MetricError, one_of
from rankscope.runs.lines import FILE
from rankscope.runs.manifest import Manifest
from rankscope.runs.store import MANIFEST, read

TABLE, ALARMS, PROVED = "training", "alarms", "training_certificates"
COLUMNS = ("step", "layer", "head", "metric", "value", "floor", "samples", "broken")
SAID = ("step", "since", "rule", "layer", "head", "action", "sentence")
BOUNDS = ("step", "theorem", "kind", "quantity", "met_to", "says_at", "log10_bound", "log10_measured", "why")
PATHS = "paths_"
"""How the names of path shares begin."""
LEARNING = ("grad_", "update_")
"""How the names of what is read of gradients and updates begin."""
NAMES = {
    "lr": "learning rate",
    "grad_tokens": "gradient: tokens",
    "grad_query_key": "gradient: queries, keys",
    "grad_value_output": "gradient: values, outputs",
    "grad_mlp": "gradient: MLP",
    "update_query_key": "update / weights: queries, keys",
    "update_value_output": "update / weights: values, outputs",
    "update_mlp": "update / weights: MLP",
}
TRIES = 5


class Grid(NamedTuple):
    """One metric over a training: `value[layer, step]`, NaN where there is no number; of several heads their
    mean."""

    metric: str
    steps: list[int]
    layers: list[int]
    value: np.ndarray
    floor: np.ndarray
    heads: int
    """Of which it is the mean; 0 where it is not of heads."""

    @property
    def noise(self) -> np.ndarray:
        """Where a value lies at or below its floor."""
        return (self.value <= self.floor) & (self.floor > 0)

    def logs(self, layer: int) -> dict[int, float]:
        """log10 at a layer by step, where there is a number that is no noise."""
        row = self.layers.index(layer) if layer in self.layers else len(self.layers)
        seen = zip(
            self.steps, self.value[row : row + 1].ravel(), self.noise[row : row + 1].ravel(), strict=False
        )
        return {
            step: float(np.log10(value)) for step, value, noise in seen if 0 < value < np.inf and not noise
        }


@dataclass(frozen=True, eq=False)
class TrainingRun:
    """What there is of a training run."""

    folder: Path
    manifest: Manifest
    table: pl.DataFrame
    alarms: pl.DataFrame
    certificates: pl.DataFrame
    """What is proved of the probe; no rows where that was not asked for."""

    @cached_property
    def steps(self) -> list[int]:
        """At which it was looked at."""
        return sorted(self.table["step"].unique().to_list())

    @cached_property
    def metrics(self) -> list[str]:
        """What was read layer by layer: as it was asked for, then gradients and updates."""
        found = self._names(pl.col("layer").is_not_null())
        asked = [name for network in self.manifest.networks for name in network.metrics]
        order = [*(name for name in asked if name in found), *found]
        return sorted(dict.fromkeys(order), key=lambda name: name.startswith(LEARNING))

    @cached_property
    def scalars(self) -> list[str]:
        """What was read of the whole run: the loss first."""
        found = self._names(pl.col("layer").is_null())
        return sorted(found, key=lambda name: (name != "loss", name != "lr"))

    @cached_property
    def paths(self) -> pl.DataFrame:
        """Path shares: step, what they are of, value."""
        rows = self.table.filter(pl.col("metric").str.starts_with(PATHS))
        named = [path_name(name, layer) for name, layer in rows.select("metric", "layer").iter_rows()]
        return rows.with_columns(pl.Series("of", named, dtype=pl.String)).select("step", "of", "value")

    @property
    def lengths(self) -> list[str]:
        """What path shares are of, the shortest paths first."""
        names = self.paths["of"].unique().to_list()
        return sorted(names, key=lambda name: ([int(n) for n in name.split() if n.isdecimal()], name))

    @property
    def name(self) -> str:
        """Of the model."""
        for network in self.manifest.networks:
            kind = (network.model or {}).get("class")
            if self.manifest.title is None and isinstance(kind, str):
                return kind.rpartition(".")[2]
        return self.manifest.title or self.manifest.model or self.folder.resolve().name

    @property
    def broken(self) -> int:
        """Readings of samples that were no numbers, as of tokens that overflowed."""
        return int(self.table["broken"].sum() or 0)

    def main(self, asked: str | None = None) -> str:
        """The metric that is shown: the one asked for, or the first."""
        if asked is not None and asked not in self.metrics:
            raise MetricError(one_of(f"a metric of {self.folder}", asked, self.metrics))
        if not self.metrics:
            raise FileError(f"{self.folder} must hold a measurement of its layers; there is none yet")
        return self.metrics[0] if asked is None else asked

    def grid(self, metric: str) -> Grid:
        """That metric by layer and step."""
        rows = self.table.filter(pl.col("metric") == metric, pl.col("layer").is_not_null())
        means = rows.group_by("layer", "step").agg(pl.col("value", "floor").mean())
        layers, steps = (sorted(means[name].unique().to_list()) for name in ("layer", "step"))
        value, floor = np.full((2, len(layers), len(steps)), np.nan)
        at = np.searchsorted(layers, means["layer"]), np.searchsorted(steps, means["step"])
        value[at], floor[at] = means["value"].to_numpy(), means["floor"].to_numpy()
        return Grid(metric, steps, layers, value, floor, rows["head"].drop_nulls().n_unique())

    def scalar(self, name: str) -> tuple[list[int], list[float]]:
        """The steps and values of a number of the whole run; NaN where it was none."""
        rows = self.table.filter(pl.col("metric") == name, pl.col("layer").is_null()).sort("step")
        return rows["step"].to_list(), rows["value"].fill_null(float("nan")).to_list()

    def _names(self, which: pl.Expr) -> list[str]:
        names = self.table.filter(which, ~pl.col("metric").str.starts_with(PATHS))["metric"]
        return [str(name) for name in names.unique(maintain_order=True)]


def read_training(folder: str | Path) -> TrainingRun:
    """The training run in a folder, as far as it is written; a sentence where there is none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileError(f"a training run is read from its folder; there is none at {folder}")
    for again in range(TRIES):
        try:
            return _read(folder)
        except FileError:
            # A run that goes back to a checkpoint takes files away, which the list that was read still has.
            if again == TRIES - 1 or TABLE not in read(folder).names:
                raise
            time.sleep(0.05)
    raise AssertionError


def stamp(folder: str | Path) -> str:
    """Another whenever something was written."""
    said = []
    for name in (MANIFEST, f"{TABLE}/{FILE}", f"{ALARMS}/{FILE}"):
        try:
            found = (Path(folder) / name).stat()
            said.append(f"{found.st_mtime_ns} {found.st_size}")
        except OSError:
            said.append("none")
    return hashlib.sha256("/".join(said).encode()).hexdigest()[:16]


def title_of(name: str) -> str:
    """A number of a run, as a heading says it.

    >>> title_of("lr"), title_of("relative_mu")
    ('learning rate', 'relative mu')
    """
    return NAMES.get(name, name.replace("_", " "))


def path_name(metric: str, layer: int | None) -> str:
    """What a path share is of.

    >>> path_name("paths_2", None), path_name("paths_share", 3), path_name("paths_bias", None)
    ('length 2', 'length 3', 'bias')
    """
    rest = metric.removeprefix(PATHS)
    if layer is not None:
        return f"length {layer}" if rest == "share" else f"{rest.replace('_', ' ')}, length {layer}"
    number = rest.rpartition("_")[2]
    return f"length {number}" if number.isdecimal() else rest.replace("_", " ")


def decades(values: np.ndarray) -> float:
    """How many powers of ten positive values span; 0 where one is negative, which has no logarithm."""
    known = values[np.isfinite(values)]
    above = known[known > 0]
    return float(np.log10(above.max() / above.min())) if len(above) and (known >= 0).all() else 0.0


def _read(folder: Path) -> TrainingRun:
    run = read(folder)
    if TABLE not in run.names:
        raise FileError(
            f"{folder} must hold a training run, as Monitor(run=...) or rankscope checkpoints writes it; it "
            "holds none"
        )
    table = _with(folder, run.table(TABLE), TABLE, COLUMNS)
    alarms = run.table(ALARMS) if ALARMS in run.names else pl.DataFrame(schema=dict.fromkeys(SAID, pl.Null))
    manifest = run.manifests.get(TABLE) or next(iter(run.manifests.values()), Manifest())
    proved = run.table(PROVED) if PROVED in run.names else pl.DataFrame(schema=dict.fromkeys(BOUNDS, pl.Null))
    return TrainingRun(
        folder, manifest, table, _with(folder, alarms, ALARMS, SAID).sort("step"),
        _with(folder, proved, PROVED, BOUNDS),
    )  # fmt: skip


def _with(folder: Path, found: pl.DataFrame, name: str, columns: Sequence[str]) -> pl.DataFrame:
    """The table with the columns it must have, each of its kind."""
    kinds: dict[str, Any] = {"metric": pl.String, "rule": pl.String, "action": pl.String}
    kinds |= {"sentence": pl.String, "value": pl.Float64, "floor": pl.Float64}
    kinds |= dict.fromkeys(("theorem", "kind", "quantity", "why"), pl.String)
    kinds |= dict.fromkeys(("log10_bound", "log10_measured"), pl.Float64)
    try:
        found = found.select(pl.col(each).cast(kinds.get(each, pl.Int64)) for each in columns)
    except pl.exceptions.PolarsError as error:
        raise FileError(
            f"{folder / name} must have the columns {', '.join(columns)}; it is damaged or of another "
            "version: run it again"
        ) from error
    bare = {"step", "metric"} & set(columns)
    if any(found[each].null_count() for each in bare):
        raise FileError(f"{folder / name} must name a step in every row; it is damaged: run it again")
    return found

"""Reads a training run: what was written of it so far, by metric, layer and step.

`Monitor` writes the tables `training` and `alarms`, which grow while it trains, and `training_certificates`
if it reads paths; `rankscope checkpoints` writes the same of a training that was not monitored. `rankscope
follow`, its page, the report and `compare` read them here. Reading needs no torch, and never waits for the
writer.
"""

import hashlib
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import polars as pl

from rankscope.errors import FileError, MetricError, one_of, require
from rankscope.runs import JOURNAL, MANIFEST, Manifest, Run, read

TRAINING_TABLE, ALARMS_TABLE, CERTIFICATES_TABLE = "training", "alarms", "training_certificates"
TRAINING: dict[str, Any] = {
    "step": pl.Int64,
    "layer": pl.Int64,  # null for numbers of the whole run, such as the loss
    "head": pl.Int64,  # null unless the metric is one of heads
    "metric": pl.String,  # of one of several stacks of blocks with its name: relative_mu/decoder
    "value": pl.Float64,  # the mean over samples; null if none was finite
    "spread": pl.Float64,  # their standard deviation
    "least": pl.Float64,
    "most": pl.Float64,
    "floor": pl.Float64,  # values below it are rounding noise; 0 if there is no floor
    "samples": pl.Int64,
    "broken": pl.Int64,  # samples whose value was NaN or infinite
}  # the columns of the table `training`: a row for each number of a measurement
ALARMS: dict[str, Any] = {
    "step": pl.Int64,
    "since": pl.Int64,  # the first measurement at which the fault was there
    "rule": pl.String,  # of one of several stacks of blocks with its name, as metrics are
    "layer": pl.Int64,
    "head": pl.Int64,
    "action": pl.String,
    "sentence": pl.String,
}  # the columns of the table `alarms`
CERTIFICATES: dict[str, Any] = {
    "step": pl.Int64,
    "theorem": pl.String,
    "kind": pl.String,  # upper or lower bound
    "quantity": pl.String,
    "met_to": pl.Int64,  # its hypotheses hold from layer 1 to this one for every sample; 0: nowhere
    "says_at": pl.Int64,  # the last layer at which it says more than is known anyway
    "log10_bound": pl.Float64,  # there, of the sample with the most slack
    "log10_measured": pl.Float64,
    "log10_size": pl.Float64,
    "slack": pl.Float64,  # decades between the two
    "broken": pl.Int64,  # guarantees that the measurement contradicts; there should be none
    "why": pl.String,  # the first hypothesis that fails, with its number
}  # the columns of the table `training_certificates`: `certify(...).summary()` of the probe, step by step
READ = {
    TRAINING_TABLE: (TRAINING, "spread least"),
    ALARMS_TABLE: (ALARMS, ""),
    CERTIFICATES_TABLE: (CERTIFICATES, "log10_size slack broken"),
}  # the schema of each table, and columns that nothing here needs: null where a table lacks them
PATHS = "paths_"  # the prefix of the names of path shares
LEARNING = ("grad_", "update_")  # the prefixes of the names of gradients and updates
NAMES = {
    "lr": "learning rate",
    "grad_tokens": "gradient: tokens",
    "grad_query_key": "gradient: queries, keys",
    "grad_value_output": "gradient: values, outputs",
    "grad_mlp": "gradient: MLP",
    "update_query_key": "update / weights: queries, keys",
    "update_value_output": "update / weights: values, outputs",
    "update_mlp": "update / weights: MLP",
    "rankme": "RankMe",
    "alpha_req": "alpha-ReQ",
    "lidar": "LiDAR",
}  # titles of numbers whose names do not say enough
ATTEMPTS = 5  # how often a run is read again that is being cut back meanwhile


class Grid(NamedTuple):
    """One metric over a training: `value[layer, step]`, NaN if there is no number; the mean over heads of a
    metric of heads."""

    metric: str
    steps: list[int]
    layers: list[int]
    value: np.ndarray
    floor: np.ndarray
    heads: int  # the number of heads that it is the mean of; 0 for a metric that is not of heads

    @property
    def noise(self) -> np.ndarray:
        """True where the size of a value lies at or below its floor."""
        return (np.abs(self.value) <= self.floor) & (self.floor > 0)

    def logs(self, layer: int) -> dict[int, float]:
        """log10 of the value at a layer by step, for positive values above the floor."""
        if layer not in self.layers:
            return {}
        row = self.layers.index(layer)
        columns = zip(self.steps, self.value[row], self.noise[row], strict=True)
        return {step: float(np.log10(x)) for step, x, noise in columns if 0 < x < np.inf and not noise}


R = TypeVar("R", bound="TrainingTables")


@dataclass(frozen=True, eq=False, repr=False)
class TrainingTables:
    """The numbers of a training run as far as it is written; `TrainingRun` (`run.py`) shows them."""

    folder: Path
    manifest: Manifest
    table: pl.DataFrame
    alarms: pl.DataFrame
    certificates: pl.DataFrame  # what is proved of the probe; no rows if the monitor read no paths
    notes: tuple[str, ...] = ()  # lines of the folder's journals that hold no rows and are left out

    @cached_property
    def steps(self) -> list[int]:
        """The steps that were measured."""
        return sorted(self.table["step"].unique().to_list())

    @cached_property
    def metrics(self) -> list[str]:
        """The metrics by layer: those of the manifest in its order, then gradients and updates."""
        names = self._names(pl.col("layer").is_not_null())
        listed = [name for network in self.manifest.networks for name in network.metrics]
        order = [*(name for name in listed if name in names), *names]
        return sorted(dict.fromkeys(order), key=lambda name: name.startswith(LEARNING))

    def of_stacks(self, metric: str) -> list[str]:
        """This metric of every stack of blocks, where the run has several: the same of an encoder and of a decoder."""
        plain = split_stack(metric)[0]
        return [name for name in self.metrics if name == metric or split_stack(name)[0] == plain]

    @property
    def learning(self) -> list[str]:
        """The gradients and updates among the metrics: in pairs, as two columns of panels show them, tokens last."""
        names = [name for name in self.metrics if name.startswith(LEARNING)]
        return sorted(names, key=lambda name: name == "grad_tokens")

    @cached_property
    def scalars(self) -> list[str]:
        """The numbers of the whole run: the loss first, then the learning rate."""
        names = self._names(pl.col("layer").is_null())
        return sorted(names, key=lambda name: (name != "loss", name != "lr"))

    @cached_property
    def paths(self) -> pl.DataFrame:
        """The path shares, with the columns `step`, `of` (which paths) and `value`."""
        rows = self.table.filter(pl.col("metric").str.starts_with(PATHS))
        named = [path_name(name, layer) for name, layer in rows.select("metric", "layer").iter_rows()]
        return rows.with_columns(pl.Series("of", named, dtype=pl.String)).select("step", "of", "value")

    @property
    def lengths(self) -> list[str]:
        """The names in the column `of` of `paths`, the shortest paths first."""
        names = self.paths["of"].unique().to_list()
        return sorted(names, key=lambda name: ([int(n) for n in name.split() if n.isdecimal()], name))

    @property
    def name(self) -> str:
        """The name of the model; of a live one, its class."""
        for network in self.manifest.networks:
            kind = (network.model or {}).get("class")
            if self.manifest.title is None and isinstance(kind, str):
                return kind.rpartition(".")[2]
        return self.manifest.title or self.manifest.model or self.folder.resolve().name

    @property
    def forecast(self) -> list[str]:
        """What was forecast of the training, and whether it holds, in sentences; none if nothing was."""
        forecast = self.manifest.more.get("forecast")
        if not isinstance(forecast, dict):
            return []
        expected, known = (forecast.get(name) for name in ("verdict", "sentences"))
        parts = [*(expected[:1] if isinstance(expected, list) else []), *(known if isinstance(known, list) else [])]
        return [str(part) for part in parts]

    @property
    def broken(self) -> int:
        """How many readings of samples were NaN or infinite."""
        return int(self.table["broken"].sum() or 0)

    def metric(self, name: str | None = None) -> str:
        """The metric of that name, or the first; raises if the run has none of that name, or none at all."""
        if name is not None and name not in self.metrics:
            raise MetricError(one_of(f"a metric of {self.folder}", name, self.metrics), subject=name)
        sentence = f"{self.folder} must hold a measurement of its layers; there is none yet"
        require(self.metrics, sentence, FileError, str(self.folder))
        return self.metrics[0] if name is None else name

    def grid(self, metric: str) -> Grid:
        """The values of a metric by layer and step."""
        rows = self.table.filter(pl.col("metric") == metric, pl.col("layer").is_not_null())
        means = rows.group_by("layer", "step").agg(pl.col("value", "floor").mean())
        layers, steps = (sorted(means[name].unique().to_list()) for name in ("layer", "step"))
        value, floor = np.full((2, len(layers), len(steps)), np.nan)
        at = np.searchsorted(layers, means["layer"]), np.searchsorted(steps, means["step"])
        value[at], floor[at] = means["value"].to_numpy(), means["floor"].to_numpy()
        return Grid(metric, steps, layers, value, floor, rows["head"].drop_nulls().n_unique())

    def scalar(self, name: str) -> tuple[list[int], list[float]]:
        """The steps and values of a number of the whole run; NaN if it was not finite."""
        rows = self.table.filter(pl.col("metric") == name, pl.col("layer").is_null()).sort("step")
        return rows["step"].to_list(), rows["value"].fill_null(float("nan")).to_list()

    def _names(self, which: pl.Expr) -> list[str]:
        names = self.table.filter(which, ~pl.col("metric").str.starts_with(PATHS))["metric"]
        return [str(name) for name in names.unique(maintain_order=True)]


def read_tables(folder: str | Path, kind: type[R]) -> R:
    """The training run in a folder as an object of this class; raises FileError if there is none."""
    folder = Path(folder)
    sentence = f"a training run is read from its folder; there is none at {folder}"
    require(folder.is_dir(), sentence, FileError, str(folder))
    for _ in range(ATTEMPTS - 1):
        try:
            return _read(folder, kind)
        except FileError:
            # A run that goes back to a checkpoint removes files that the manifest, read before, still lists.
            if TRAINING_TABLE not in read(folder).names:
                raise
            time.sleep(0.05)
    return _read(folder, kind)


def stamp(folder: str | Path) -> str:
    """A short text that changes whenever something is written to the folder."""
    files = []
    for name in (MANIFEST, f"{TRAINING_TABLE}/{JOURNAL}", f"{ALARMS_TABLE}/{JOURNAL}"):
        try:
            file = (Path(folder) / name).stat()
            files.append(f"{file.st_mtime_ns} {file.st_size}")
        except OSError:
            files.append("none")
    return hashlib.sha256("/".join(files).encode()).hexdigest()[:16]


def in_stack(name: str, stack: str) -> str:
    """The name of a metric of layers, or of a rule, for one of several stacks of blocks, as an encoder and a decoder
    are; of one stack alone, whose name is empty, the name itself.

    >>> in_stack("relative_mu", "decoder"), in_stack("relative_mu", "")
    ('relative_mu/decoder', 'relative_mu')
    """
    return f"{name}/{stack}" if stack else name


def split_stack(name: str) -> tuple[str, str]:
    """(The metric, the stack of blocks that it is of, or nothing) of what `in_stack` gave."""
    metric, _, stack = name.partition("/")
    return metric, stack


def title_of(name: str) -> str:
    """The title of a metric or number of a run.

    >>> title_of("lr"), title_of("relative_mu"), title_of("grad_mlp/decoder")
    ('learning rate', 'relative mu', 'gradient: MLP (decoder)')
    """
    metric, stack = split_stack(name)
    title = NAMES.get(metric, metric.replace("_", " "))
    return f"{title} ({stack})" if stack else title


def path_name(metric: str, layer: int | None) -> str:
    """The paths that a path share is of, in words.

    >>> path_name("paths_2", None), path_name("paths_share", 3), path_name("paths_bias", None)
    ('length 2', 'length 3', 'bias')
    """
    rest = metric.removeprefix(PATHS)
    if layer is not None:
        return f"length {layer}" if rest == "share" else f"{rest.replace('_', ' ')}, length {layer}"
    length = rest.rpartition("_")[2]
    return f"length {length}" if length.isdecimal() else rest.replace("_", " ")


def decades(values: np.ndarray) -> float:
    """How many powers of ten the positive values span; 0 if a value is negative."""
    finite = values[np.isfinite(values)]
    positive = finite[finite > 0]
    spans = len(positive) and (finite >= 0).all()
    return float(np.log10(positive.max() / positive.min())) if spans else 0.0


def _read(folder: Path, kind: type[R]) -> R:
    run = read(folder)
    sentence = f"{folder} must hold a training run, as Monitor(run=...) or rankscope checkpoints writes it"
    require(TRAINING_TABLE in run.names, sentence, FileError, str(folder))
    manifest = run.manifests.get(TRAINING_TABLE) or next(iter(run.manifests.values()), Manifest())
    notes: list[str] = []
    table, alarms, certificates = (_table(run, name, notes) for name in READ)
    return kind(folder, manifest, table, alarms.sort("step"), certificates, tuple(notes))


def _table(run: Run, name: str, notes: list[str]) -> pl.DataFrame:
    """A table with its columns, each of its type, without rows if the run has none; raises if damaged. Sentences on
    lines that are left out are added to `notes`."""
    path, (columns, unneeded) = str(run.folder / name), READ[name]
    table, left_out = run.table_and_notes(name) if name in run.names else (pl.DataFrame(schema=columns), [])
    notes += left_out
    lacking = [column for column in unneeded.split() if column not in table.columns]
    table = table.with_columns(pl.lit(None, columns[column]).alias(column) for column in lacking)
    try:
        table = table.select(pl.col(column).cast(kind) for column, kind in columns.items())
    except pl.exceptions.PolarsError as error:
        sentence = f"{path} must have the columns {', '.join(columns)}; it is damaged: run it again"
        raise FileError(sentence, subject=path) from error
    named = not any(table[column].null_count() for column in {"step", "metric"} & columns.keys())
    require(named, f"{path} must name a step in every row; it is damaged: run it again", FileError, path)
    return table

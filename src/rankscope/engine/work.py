"""The work of one cell, in whatever process it is done, and the processes of one machine that do it.

`measure_cell` builds the network of a cell, measures it and returns rows. `LocalProcesses` calls it in the pool of
`workers`, `cluster.py` in Ray tasks. What a cell needs that is large (trained weights, tokens) comes from an
`InputsLoader` (`shared_inputs.py`). Numbers depend on the cell alone: every worker has the same number of threads.
"""

import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import polars as pl
import torch
from torch import Tensor

from rankscope.engine.spec import JOBS, Cell, SweepOptions, cell_network
from rankscope.errors import FileError, RankscopeError, SourceError, SweepError
from rankscope.nets import Transformer
from rankscope.profiles import SCHEMA
from rankscope.workers import cores, run_pieces, worker_index

READINGS = ("sample", "layer", "head", "metric", "arithmetic", "value", "log10", "floor", "below_floor", "digits")


@dataclass(frozen=True)
class CellInputs:
    """A network and the tokens that it reads."""

    net: Transformer
    X: Tensor
    padding: Tensor


@dataclass(frozen=True)
class CellOutcome:
    """How a cell ended: its rows by table, or the reason why there are none."""

    tables: dict[str, pl.DataFrame] = field(default_factory=dict)
    reason: str | None = None
    lasting: bool = True
    """True if another attempt would end the same way: a bad combination of factors, not a lack of memory."""
    seconds: float = 0.0


@dataclass(frozen=True)
class InputsLoader:
    """Loads or makes the inputs of a cell; sent to the worker with the cell, and called there."""

    name: str  # Equal for two loaders only if they give the same inputs
    load: Callable[[], CellInputs]
    large: bool = False  # True if the loader holds the weights themselves: Ray then brings it to each node once


CellTask = tuple[int, Cell, InputsLoader]  # The index of a cell, its factors, and the loader of its network and tokens


class LocalProcesses:
    """Measures cells on `workers` processes of `threads` threads each, on GPUs in turn if `gpus` > 0."""

    def __init__(self, workers: int | None = None, threads: int = 1, gpus: float = 0.0) -> None:
        self.threads, self.gpus = threads, torch.cuda.device_count() if gpus else 0
        if gpus > self.gpus:
            sentence = f"gpus_per_cell must be at most what this machine has, {self.gpus}; got {gpus:g}: 0 is the CPU"
            raise SweepError(sentence, subject="gpus_per_cell")
        most = max(1, int(self.gpus / gpus)) if gpus else max(1, cores() // threads)
        self.workers = most if workers is None else workers

    def outcomes(self, tasks: Iterable[CellTask], options: SweepOptions) -> Iterator[tuple[int, CellOutcome]]:
        """Measure cells; each outcome comes with the index of its cell, in the order in which they end."""
        work = partial(_measure_task, options, self.threads, self.gpus)
        with closing(run_pieces(work, tasks, self.workers, threads=self.threads)) as results:
            for result in results:
                # A worker returns every error of a cell as an outcome; what is left is its own death.
                yield result.piece[0], result.value or CellOutcome(reason=result.error, lasting=False)


def _measure_task(options: SweepOptions, threads: int, gpus: int, task: CellTask) -> CellOutcome:
    device = f"cuda:{worker_index() % gpus}" if gpus else "cpu"
    return measure_cell(*task[1:], options, threads, device)


_last: tuple[tuple[str, int], CellInputs] | None = None
"""The inputs of the cell that this process measured last, under the name of their loader and the threads."""


def measure_cell(cell: Cell, loader: InputsLoader, options: SweepOptions, threads: int, device: str) -> CellOutcome:
    """Measure one cell; whatever goes wrong becomes the reason of its outcome.

    Inputs that two cells in a row have in common are loaded once.
    """
    global _last
    start, key = time.perf_counter(), (loader.name, threads)
    torch.set_num_threads(threads)
    try:
        if _last is None or _last[0] != key:
            _last = None  # frees the old inputs before the new ones are loaded
            _last = key, loader.load()
        tables = measured_tables(_last[1], cell, options, device)
    except Exception as error:
        _last = None if _is_memory_error(error) else _last
        return replace(failed(error), seconds=time.perf_counter() - start)
    return CellOutcome(tables, seconds=time.perf_counter() - start)


def failed(error: Exception) -> CellOutcome:
    """The outcome of a cell that ended in this error."""
    if isinstance(error, RankscopeError):
        # A missing file or model may be there at the next attempt.
        return CellOutcome(reason=str(error), lasting=not isinstance(error, FileError | SourceError))
    lines = str(error).strip().splitlines() or ["no reason given"]
    if _is_memory_error(error):
        reason = f"out of memory ({lines[0]}): fewer tokens, or fewer workers at a time"
    else:
        frames = traceback.extract_tb(error.__traceback__)[-1:]
        where = "".join(f" ({frame.name}, line {frame.lineno})" for frame in frames)
        reason = f"{type(error).__name__}: {lines[0]}{where}"
    return CellOutcome(reason=reason, lasting=False)


def _is_memory_error(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and re.search("allocate|out of memory", str(error)) is not None


def measured_tables(inputs: CellInputs, cell: Cell, options: SweepOptions, device: str) -> dict[str, pl.DataFrame]:
    """The tables of a cell: readings, and those of the jobs that the options ask for."""
    from rankscope.profiles import measure

    net = cell_network(inputs.net.to(device=device), cell)
    X, padding = inputs.X.to(device), inputs.padding.to(device)
    profile = measure(net, X, padding, options.metrics, options.arithmetic, check=options.check)
    tables = {"sweep": profile.table}
    for job in map(JOBS.__getitem__, options.jobs):
        given = (cell_network(inputs.net, cell), inputs.X, inputs.padding) if job.on_cpu else (net, X, padding)
        tables[job.table] = job.compute(*given)
    columns = columns_of(options)
    return {name: _with_columns(columns[name], table) for name, table in tables.items()}


def columns_of(options: SweepOptions) -> dict[str, Mapping[str, Any]]:
    """The columns of each table of a cell."""
    jobs = map(JOBS.__getitem__, options.jobs)
    return {"sweep": {name: SCHEMA[name] for name in READINGS}, **{job.table: job.columns for job in jobs}}


def _with_columns(schema: Mapping[str, Any], table: pl.DataFrame) -> pl.DataFrame:
    """A table with exactly these columns and types; a column that it lacks is null."""
    return table.select(
        pl.col(name).cast(dtype) if name in table.columns else pl.lit(None, dtype).alias(name)
        for name, dtype in schema.items()
    )

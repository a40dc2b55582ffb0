"""The work of one cell, in whatever process it is done: build its network, measure, return rows.

`CellWorker.measure` is called by the processes of `pool.py` and by the Ray tasks of `cluster.py`. What a cell
needs that is large (trained weights, tokens) comes from an `InputsLoader` (`shared_inputs.py`). Numbers
depend on the cell alone: every worker has the same number of threads.
"""

import re
import time
import traceback
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import polars as pl
import torch
from torch import Tensor

from rankscope.engine.factors import Cell, cell_network
from rankscope.engine.spec import SweepOptions
from rankscope.errors import FileError, RankscopeError, SourceError
from rankscope.nets import Transformer

MEASURE_COLUMNS = {
    "sample": pl.Int64, "layer": pl.Int64, "head": pl.Int64, "metric": pl.String, "arithmetic": pl.String,
    "value": pl.Float64, "log10": pl.Float64, "floor": pl.Float64, "below_floor": pl.Boolean,
    "digits": pl.Float64,
}  # fmt: skip
PATH_COLUMNS = {"sample": pl.Int64, "length": pl.Int64, "share": pl.Float64}
"""Of `decompose`: the share of the output that paths of each length carry."""
CERTIFICATE_COLUMNS = {
    "theorem": pl.String, "met_to": pl.Int64, "says_at": pl.Int64, "log10_bound": pl.Float64,
    "log10_measured": pl.Float64, "slack": pl.Float64, "why": pl.String,
}  # fmt: skip
TABLES: dict[str, dict[str, Any]] = {
    "sweep": MEASURE_COLUMNS, "sweep_paths": PATH_COLUMNS, "sweep_certificates": CERTIFICATE_COLUMNS
}  # fmt: skip
"""Columns of each table of a cell."""


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


@runtime_checkable
class InputsLoader(Protocol):
    """Loads or makes the inputs of a cell; a small object that is sent to the worker with the cell."""

    @property
    def name(self) -> str:
        """A name that two loaders have in common only if they give the same inputs."""

    def __call__(self) -> CellInputs:
        """Load the network and its tokens, in the process of the worker."""


class CellWorker:
    """Measures cells one after another; inputs that two cells in a row have in common are loaded once."""

    def __init__(self, threads: int = 1, device: str = "cpu") -> None:
        self.threads, self.device = threads, device
        self._last: tuple[str, CellInputs] | None = None
        """The loader's name, and the inputs, of the previous cell."""

    def measure(self, cell: Cell, options: SweepOptions, loader: InputsLoader) -> CellOutcome:
        """Measure one cell; whatever goes wrong becomes the reason of its outcome."""
        start = time.perf_counter()
        torch.set_num_threads(self.threads)
        try:
            if self._last is None or self._last[0] != loader.name:
                self._last = None  # frees the old inputs before the new ones are loaded
                self._last = loader.name, loader()
            tables = measured_tables(self._last[1], cell, options, self.device)
        except Exception as error:
            self._last = None if _is_memory_error(error) else self._last
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
    """The tables of a cell: readings, and path shares and certificates where the options ask for them."""
    from rankscope.paths import decompose
    from rankscope.profiles import measure
    from rankscope.theory import certify

    net = cell_network(inputs.net.to(device=device), cell)
    X, padding = inputs.X.to(device), inputs.padding.to(device)
    profile = measure(net, X, padding, options.metrics, options.arithmetic, check=options.check)
    tables = {"sweep": _with_columns(MEASURE_COLUMNS, profile.table)}
    if options.paths:
        shares = decompose(net, X, padding).by_length().table.filter(start="all").sort("sample", "length")
        tables["sweep_paths"] = _with_columns(PATH_COLUMNS, shares)
    if options.certify:
        cpu_net = cell_network(inputs.net, cell)  # theory is computed on the CPU
        summary = certify(cpu_net, inputs.X, inputs.padding).summary()
        tables["sweep_certificates"] = _with_columns(CERTIFICATE_COLUMNS, summary)
    return tables


def _with_columns(schema: dict[str, Any], table: pl.DataFrame) -> pl.DataFrame:
    """A table with exactly these columns and types; a column that it lacks is null."""
    return table.select(
        pl.col(name).cast(dtype) if name in table.columns else pl.lit(None, dtype).alias(name)
        for name, dtype in schema.items()
    )

"""The work of one cell, wherever it is done: build what it says, measure, hand back rows.

A cell is small; what it needs that is large (the weights of a trained model, the tokens of a text) is
prepared once and shared (`shared.py`). Numbers depend on the cell alone: threads are the same everywhere.
"""

import re
import time
import traceback
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import polars as pl
import torch
from torch import Tensor

from rankscope.engine.factors import Cell, changed
from rankscope.engine.spec import Asked
from rankscope.errors import FileError, RankscopeError, SourceError
from rankscope.nets import Transformer

ROWS = {
    "sample": pl.Int64, "layer": pl.Int64, "head": pl.Int64, "metric": pl.String, "arithmetic": pl.String,
    "value": pl.Float64, "log10": pl.Float64, "floor": pl.Float64, "below_floor": pl.Boolean,
    "digits": pl.Float64,
}  # fmt: skip
"""Of `measure`."""
SHARES = {"sample": pl.Int64, "length": pl.Int64, "share": pl.Float64}
"""Of `decompose`: the share of the output that paths of each length carry."""
PROVED = {
    "theorem": pl.String, "met_to": pl.Int64, "says_at": pl.Int64, "log10_bound": pl.Float64,
    "log10_measured": pl.Float64, "slack": pl.Float64, "why": pl.String,
}  # fmt: skip
"""Of `certify`."""
TABLES: dict[str, dict[str, Any]] = {"sweep": ROWS, "sweep_paths": SHARES, "sweep_certificates": PROVED}


@dataclass(frozen=True)
class Ready:
    """A network and the tokens that it reads."""

    net: Transformer
    X: Tensor
    padding: Tensor


@dataclass(frozen=True)
class Outcome:
    """What came of a cell: rows by table, or why there are none."""

    tables: dict[str, pl.DataFrame] = field(default_factory=dict)
    reason: str | None = None
    lasting: bool = True
    """Whether the same would come of it again: a bad combination, not a lack of memory."""
    seconds: float = 0.0


@runtime_checkable
class Opener(Protocol):
    """Finds or makes what a cell needs, in whatever process: sent there with the cell."""

    @property
    def name(self) -> str:
        """The same where what it gives is the same."""

    def __call__(self) -> Ready:
        """The network and its tokens."""


class Worker:
    """Does cells one after another; what the last one had prepared serves the next."""

    def __init__(self, threads: int = 1, device: str = "cpu") -> None:
        self.threads, self.device = threads, device
        self._last: tuple[str, Ready] | None = None

    def do(self, cell: Cell, asked: Asked, opener: Opener) -> Outcome:
        """One cell."""
        start = time.perf_counter()
        torch.set_num_threads(self.threads)
        try:
            if self._last is None or self._last[0] != opener.name:
                self._last = None  # let go before another is made
                self._last = opener.name, opener()
            tables = _measured(self._last[1], cell, asked, self.device)
        except Exception as error:
            self._last = None if _memory(error) else self._last
            return replace(failed(error), seconds=time.perf_counter() - start)
        return Outcome(tables, seconds=time.perf_counter() - start)


def failed(error: Exception) -> Outcome:
    """A cell that came to nothing, and why."""
    if isinstance(error, RankscopeError):
        # What a file or the network lacks today may be there tomorrow.
        return Outcome(reason=str(error), lasting=not isinstance(error, FileError | SourceError))
    lines = str(error).strip().splitlines() or ["no reason given"]
    if _memory(error):
        said = f"out of memory ({lines[0]}): fewer tokens, or fewer workers at a time"
        return Outcome(reason=said, lasting=False)
    where = traceback.extract_tb(error.__traceback__)[-1:]
    place = "".join(f" ({each.name}, line {each.lineno})" for each in where)
    return Outcome(reason=f"{type(error).__name__}: {lines[0]}{place}", lasting=False)


def _memory(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and re.search("allocate|out of memory", str(error)) is not None


def _measured(ready: Ready, cell: Cell, asked: Asked, device: str) -> dict[str, pl.DataFrame]:
    from rankscope.paths import decompose
    from rankscope.profiles import measure
    from rankscope.theory import certify

    net = changed(ready.net.to(device=device), cell)
    X, padding = ready.X.to(device), ready.padding.to(device)
    profile = measure(net, X, padding, asked.metrics, asked.arithmetic, check=asked.check)
    found = {"sweep": _as(ROWS, profile.table)}
    if asked.paths:
        rows = decompose(net, X, padding).by_length().table.filter(start="all").sort("sample", "length")
        found["sweep_paths"] = _as(SHARES, rows)
    if asked.certify:
        here = changed(ready.net, cell)  # theory is computed on the CPU
        found["sweep_certificates"] = _as(PROVED, certify(here, ready.X, ready.padding).summary())
    return found


def _as(schema: dict[str, Any], table: pl.DataFrame) -> pl.DataFrame:
    return table.select(
        pl.col(name).cast(kind) if name in table.columns else pl.lit(None, kind).alias(name)
        for name, kind in schema.items()
    )

"""What a sweep can compute of each cell beside its readings: kinds of job, each with a table of its own.

A specification asks for one by its name, `paths = true`. Plugins add theirs (`docs/extending.md`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl
from torch import Tensor

from rankscope.nets import Transformer
from rankscope.plugins import Group
from rankscope.trainings import CERTIFICATES


@dataclass(frozen=True)
class CellJob:
    """A kind of job: a table that is computed of every cell.

    Args:
        name: What a specification calls it.
        columns: The columns of the table, with their types in polars.
        compute: Called with a cell's network, its tokens `[sample, token, width]` and its padding; returns the table.
            Columns that it lacks are null.
        table: What the table is called in the run folder; `sweep_` and the name if left out.
        on_cpu: True if it is computed on the CPU wherever cells are measured.
    """

    name: str
    columns: Mapping[str, Any]
    compute: Callable[[Transformer, Tensor, Tensor], pl.DataFrame]
    table: str = ""
    on_cpu: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", self.table or f"sweep_{self.name}")


def _path_shares(net: Transformer, X: Tensor, padding: Tensor) -> pl.DataFrame:
    from rankscope.paths import decompose

    return decompose(net, X, padding).by_length().table.filter(start="all").sort("sample", "length")


def _proved(net: Transformer, X: Tensor, padding: Tensor) -> pl.DataFrame:
    from rankscope.theory import certify

    return certify(net, X, padding).summary()


_PROVED = ("theorem", "met_to", "says_at", "log10_bound", "log10_measured", "slack", "why")
SHIPPED = (
    CellJob("paths", {"sample": pl.Int64, "length": pl.Int64, "share": pl.Float64}, _path_shares),
    CellJob("certify", {name: CERTIFICATES[name] for name in _PROVED}, _proved, "sweep_certificates", on_cpu=True),
)
JOBS: Group[CellJob] = Group("jobs", "a CellJob", lambda each: isinstance(each, CellJob))
"""Every kind of job by name."""

"""`sweep`: many cells, each measured once, kept as it ends.

In the run folder

    sweep.parquet               all rows, a column for each factor; likewise sweep_paths, sweep_certificates
    cells.parquet               a row for each cell: its factors, whether it failed and why, how long it took
    kept/, kept_.../            what came of cells, in the order in which they ended: what a run goes on from

Tables are made of what is kept, in the order of the specification: they depend neither on how many workers
there were, nor on who was first, nor on how often it was interrupted.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from rankscope.engine.pool import Local
from rankscope.engine.shared import Shared
from rankscope.engine.spec import Asked, Spec, read_spec, spec_of
from rankscope.engine.texts import Contents
from rankscope.engine.views import view_of
from rankscope.engine.work import TABLES, Outcome
from rankscope.errors import SweepError
from rankscope.files import undisturbed
from rankscope.runs import Manifest, Store, read
from rankscope.runs.journal import Journal
from rankscope.runs.key import digest, key_of
from rankscope.runs.manifest import begun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENTRY = "sweep"
KEPT = "kept"
STATUS = {
    "step": pl.Int64, "cell": pl.String, "reason": pl.String, "lasting": pl.Boolean, "seconds": pl.Float64
}  # fmt: skip
"""Of what is kept of a cell: its key, and how it ended."""
LONG = 24
"""Digits of a key: no two of a million cells have the same."""
Progress = Callable[[int, int], None]
"""Hears how many cells are done, and of how many."""


@dataclass(frozen=True)
class Sweep:
    """What came of a sweep."""

    run: Path
    spec: Spec
    table: pl.DataFrame
    """All rows of `measure`, a column for each factor."""
    cells: pl.DataFrame
    """A row for each cell: `cell` (its number), factors, `done`, `reason`, `seconds`."""

    @property
    def failed(self) -> pl.DataFrame:
        """Cells of which there are no numbers, and why."""
        return self.cells.filter(pl.col("reason").is_not_null())

    def plot(
        self,
        metric: str | None = None,
        *,
        ax: "Iterable[Axes] | None" = None,
        figsize: tuple[float, float] | None = None,
    ) -> "Figure":
        """A metric by layer in small multiples, and at the last layer factor by factor; the first where none
        is named. Into as many axes `ax` as it has panels, if given, or a new figure of `figsize` inches."""
        from rankscope.engine.figures import sweep_curves_chart, sweep_levels_chart
        from rankscope.figures.plot import plot

        view = view_of(read(self.run), metric)
        charts = [sweep_curves_chart(view, *view.arranged, most=4), sweep_levels_chart(view, most=4)]
        return plot(*(chart for chart in charts if chart.panels), ax=ax, figsize=figsize)

    def __repr__(self) -> str:
        done, failed = int(self.cells["done"].sum()), len(self.failed)
        return f"Sweep({done - failed} of {len(self.cells)} cells, {failed} failed, {self.run})"


def sweep(
    spec: str | Path | Mapping[str, Any] | Spec,
    run: str | Path = "runs/sweep",
    *,
    on: str | None = None,
    workers: int | None = None,
    threads: int = 1,
    gpus_per_cell: float = 0.0,
    progress: Progress = lambda done, of: None,
    say: Callable[[str], None] = lambda sentence: None,
    command: str | None = None,
) -> Sweep:
    """Measure every cell of a specification (`spec.py`), and keep what came of it in a run folder.

    `on` is None for processes of this machine, "ray" for a Ray of its own (or the one that `RAY_ADDRESS`
    names), or "ray:HOST:PORT". What the folder has of the same cells is not computed again. `threads` are
    those of each cell: numbers may differ in their last digit with them, and between kinds of processors.
    `progress` hears how many cells are done, and of how many; `say` where Ray's dashboard is.
    `command` is kept in the manifest.
    """
    found = (
        spec if isinstance(spec, Spec) else spec_of(spec) if isinstance(spec, Mapping) else read_spec(spec)
    )
    if threads < 1 or (workers is not None and workers < 1) or gpus_per_cell < 0:
        raise SweepError(
            f"workers and threads must be 1 or more, GPUs 0 or more; got {workers}, {threads} and "
            f"{gpus_per_cell:g}"
        )
    contents = Contents(found.cells)
    device = "cuda" if gpus_per_cell else "cpu"
    keys = keys_of(found, contents, threads, device)
    manifest = begun(device).adding(
        command=command, asked=asdict(found.asked), factors=found.factors, varied=found.varied
    )
    opened, shared_by = _engine(on, workers, threads, gpus_per_cell)
    with opened as engine, Store(run) as store:
        if address := getattr(engine, "dashboard", None):
            say(f"Ray's dashboard: {address}")
        with shared_by(store.folder, contents, threads) as shared:
            kept = _Kept(store, found.asked, manifest)
            left = [number for number, key in enumerate(keys) if not kept.has(key)]
            before = len(keys) - len(left)
            progress(before, len(keys))
            tasks = ((number, cell, shared.opener(cell)) for number in left for cell in [found.cells[number]])
            try:
                with closing(engine.outcomes(tasks, found.asked)) as outcomes:
                    for done, (number, outcome) in enumerate(outcomes, 1):
                        with undisturbed():
                            kept.add(keys[number], outcome)
                        progress(before + done, len(keys))
            finally:
                with undisturbed():
                    kept.gather()
                tables = _tables(found, keys, kept)
                store.write(ENTRY, manifest, tables)
    return Sweep(Path(run), found, tables["sweep"], tables["cells"])


def keys_of(spec: Spec, contents: Contents, threads: int, device: str) -> list[str]:
    """What decides the numbers of each cell, as a short name; the same on any machine."""
    about = key_of(asked=asdict(spec.asked), threads=threads, device=device)
    return [digest({**about, "cell": cell, "content": contents.of(cell)}, LONG) for cell in spec.cells]


class _Kept:
    """What has come of cells, on disk."""

    def __init__(self, store: Store, asked: Asked, manifest: Manifest) -> None:
        self.store = store
        names = [
            "sweep",
            *(["sweep_paths"] if asked.paths else []),
            *(["sweep_certificates"] if asked.certify else []),
        ]
        start = {"step": pl.Int64, "cell": pl.String}
        self.rows = {
            name: Journal(store, ENTRY, f"{KEPT}_{name}", {**start, **TABLES[name]}, manifest)
            for name in names
        }
        self.status = Journal(store, ENTRY, KEPT, STATUS, manifest)
        self.step = max((each.last or 0) for each in (self.status, *self.rows.values()))
        self.ended = {row["cell"]: row for row in read(store.folder).table(KEPT).iter_rows(named=True)}

    def has(self, key: str) -> bool:
        """Whether there is nothing left to do: it has rows, or would fail again."""
        return key in self.ended and bool(self.ended[key]["lasting"])

    def add(self, key: str, outcome: Outcome) -> None:
        """Its rows first: a cell counts from when its own line is there."""
        self.step += 1
        mark = pl.lit(self.step, pl.Int64).alias("step"), pl.lit(key).alias("cell")
        for name, table in outcome.tables.items():
            self.rows[name].append(self.step, table.select(*mark, pl.all()))
        row = {"step": self.step, "cell": key, "reason": outcome.reason, "lasting": outcome.lasting,
               "seconds": outcome.seconds}  # fmt: skip
        self.status.append(self.step, pl.DataFrame([row], schema=STATUS))
        self.ended[key] = row

    def gather(self) -> None:
        """Lines into Parquet."""
        for each in (*self.rows.values(), self.status):
            each.gather()

    def table(self, name: str) -> pl.DataFrame:
        """Rows that count: those of the last time that their cell was done."""
        rows = read(self.store.folder).table(f"{KEPT}_{name}").with_row_index("at")
        last = pl.DataFrame(
            [(key, row["step"]) for key, row in self.ended.items()],
            schema={"cell": pl.String, "step": pl.Int64}, orient="row",
        )  # fmt: skip
        return rows.join(last, on=["cell", "step"], how="semi")


def _tables(spec: Spec, keys: list[str], kept: _Kept) -> dict[str, pl.DataFrame]:
    """In the order of the specification."""
    factors = _frame(spec)
    ended = [kept.ended.get(key, {}) for key in keys]
    cells = factors.with_columns(
        pl.Series("done", [bool(each) for each in ended]),
        pl.Series("reason", [each.get("reason") for each in ended], pl.String),
        pl.Series("seconds", [each.get("seconds") for each in ended], pl.Float64),
    )
    found = {"cells": cells}
    numbered = factors.with_columns(pl.Series("key", keys, pl.String))
    for name in kept.rows:
        rows = kept.table(name).rename({"cell": "key"}).drop("step")
        # Rows of a cell stay in the order in which they were measured.
        joined = numbered.join(rows, on="key", how="inner").sort("cell", "at")
        found[name] = joined.drop("key", "at")
    return found


def _frame(spec: Spec) -> pl.DataFrame:
    """The number of each cell, and its factors; a factor that is a word somewhere is a word everywhere."""
    columns: dict[str, pl.Series] = {"cell": pl.Series(range(len(spec.cells)), dtype=pl.Int64)}
    for name in spec.factors:
        values = [cell.get(name) for cell in spec.cells]
        kinds = {type(value) for value in values if value is not None}
        if str in kinds or (bool in kinds and len(kinds) > 1):
            columns[name] = pl.Series(
                [None if value is None else str(value) for value in values], dtype=pl.String
            )
        elif float in kinds:
            columns[name] = pl.Series(values, dtype=pl.Float64)
        else:
            columns[name] = pl.Series(values, dtype=pl.Boolean if bool in kinds else pl.Int64)
    return pl.DataFrame(columns)


def _engine(on: str | None, workers: int | None, threads: int, gpus: float) -> tuple[Any, type[Shared]]:
    """Where cells are done, and how what they share comes there."""
    if on is None:
        return Local(workers, threads, gpus), Shared
    from rankscope.engine.cluster import Stored, cluster

    return cluster(on, workers, threads, gpus), Stored

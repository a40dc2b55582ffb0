"""`sweep`: many cells, each measured once and written to disk as it ends.

In the run folder

    sweep.parquet               all rows, a column for each factor; likewise sweep_paths, sweep_certificates
    cells.parquet               a row for each cell: its factors, whether it failed and why, how long it took
    kept/, kept_.../            journals of the cells that ended, in that order: where a run resumes from

Tables are made from the journals, in the order of the specification: they do not depend on how many workers
there were, on which was first, or on how often the run was interrupted.
"""

from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import polars as pl

from rankscope.engine.cluster import STUCK_AFTER, Cluster
from rankscope.engine.sections import Sweep
from rankscope.engine.shared_inputs import FileChecksums, RaySharedInputs, SharedInputs
from rankscope.engine.spec import Spec, SweepOptions, read_spec, spec_of
from rankscope.engine.work import CellOutcome, LocalProcesses, columns_of
from rankscope.errors import SweepError, require, require_one_of
from rankscope.files import undisturbed
from rankscope.results import plain_value
from rankscope.runs import Journal, Manifest, Store, begun, digest, key_of, read

ENTRY, JOURNAL = "sweep", "kept"
STATUS = {"step": pl.Int64, "cell": pl.String, "reason": pl.String, "lasting": pl.Boolean, "seconds": pl.Float64}
"""Columns of the journal that says how each cell ended; `cell` is its key."""
KEY_DIGITS = 24  # of a cell's key: no two of a million cells have the same
Progress = Callable[[int, int], None]  # Called with the number of cells that are done, and of all


class ResourceOptions(TypedDict, total=False):
    """Where the cells of a sweep are measured and with what: further options of `sweep`, each a keyword."""

    on: str | None
    """None (the default) for processes of this machine; "ray" for Ray on this machine, or the cluster that
    `RAY_ADDRESS` names; "ray:HOST:PORT" for a cluster."""
    workers: int | None
    """Cells at a time; one for each core if left out."""
    threads: int
    """Threads of each cell, 1 if left out. The last digit of numbers may differ with it."""
    gpus_per_cell: float
    """GPUs of each cell, or a share of one; 0 (the default) measures on the CPU."""
    stuck_after: float
    """On Ray: seconds without any result after which the cells that run are cancelled and tried once more; then they
    have failed."""


def sweep(
    spec: str | Path | Mapping[str, Any] | Spec,
    run: str | Path = "runs/sweep",
    *,
    progress: Progress = lambda done, of: None,
    say: Callable[[str], None] = lambda sentence: None,
    command: str | None = None,
    **resources: Unpack[ResourceOptions],
) -> Sweep:
    """Measure every cell of a specification, and write each to a run folder as it ends.

    Cells that the folder holds already are not computed again, so the same call resumes a run that was
    interrupted. A cell that failed is tried again, unless it would fail again (as a bad combination of factors).

    Args:
        spec: A TOML file, a dictionary with the same content, or a `Spec` (`docs/sweeps.md`).
        run: The run folder.
        progress: Called with the number of cells that are done, and of all.
        say: Called with a sentence that says where Ray's dashboard is.
        command: The command line, for the manifest.
        resources: `on`, `workers`, `threads`, `gpus_per_cell` and `stuck_after`: those of `ResourceOptions`.

    Returns:
        The tables of the sweep; a cell that failed is in `Sweep.failed` with its reason.

    Raises:
        SweepError: If the specification does not hold together, or there is nowhere to run it.

    >>> import tempfile
    >>> spec = {"metrics": "mu", "all": {"model": "bert-tiny", "depth": 1, "samples": 1, "tokens": 4}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sweep(spec, folder, workers=1).table["layer"].to_list()
    [0, 1]
    """
    for name in resources:
        require_one_of("an option of sweep", name, ResourceOptions.__annotations__, SweepError, name)
    on, workers, threads = resources.get("on"), resources.get("workers"), resources.get("threads", 1)
    gpus_per_cell, stuck_after = resources.get("gpus_per_cell", 0.0), resources.get("stuck_after", STUCK_AFTER)
    if not isinstance(spec, Spec):
        spec = spec_of(spec) if isinstance(spec, Mapping) else read_spec(spec)
    for name, value, least in (("workers", workers, 1), ("threads", threads, 1), ("gpus_per_cell", gpus_per_cell, 0)):
        if value is not None:
            require(value >= least, f"{name} must be {least} or more; got {value:g}", SweepError, name)
    checksums = FileChecksums(spec.cells)
    device = "cuda" if gpus_per_cell else "cpu"
    common = key_of(asked=spec.options.asked, threads=threads, device=device)
    # Equal keys, on any machine: all that decides the numbers of a cell is equal.
    keys = [digest({**common, "cell": cell, "content": checksums.of(cell)}, KEY_DIGITS) for cell in spec.cells]
    told = plain_value({"asked": spec.options.asked, "factors": spec.factors, "varied": spec.varied})
    manifest = begun(device).adding(command=command, **told)
    size = workers, threads, gpus_per_cell
    connection: Any = nullcontext(LocalProcesses(*size)) if on is None else Cluster(on, *size, stuck_after)
    inputs_kind = SharedInputs if on is None else RaySharedInputs
    with connection as engine, Store(run) as store:
        if address := getattr(engine, "dashboard", None):
            say(f"Ray's dashboard: {address}")
        with inputs_kind(store.folder, checksums, threads) as inputs:
            journal = CellJournal(store, spec.options, manifest)
            left = [(index, spec.cells[index]) for index, key in enumerate(keys) if not journal.has(key)]
            before = len(keys) - len(left)
            progress(before, len(keys))
            tasks = ((index, cell, inputs.loader(cell)) for index, cell in left)
            try:
                with closing(engine.outcomes(tasks, spec.options)) as outcomes:
                    for done, (index, outcome) in enumerate(outcomes, 1):
                        with undisturbed():
                            journal.add(keys[index], outcome)
                        progress(before + done, len(keys))
            finally:
                with undisturbed():
                    journal.gather()
                tables = _tables(spec, keys, journal)
                store.write(ENTRY, manifest, tables, kind=Sweep.kind)
    return replace(Sweep.made_of(tables, manifest, {}), run=Path(run))


class CellJournal:
    """The outcomes of cells on disk, appended as they come; a run that was interrupted resumes from it."""

    def __init__(self, store: Store, options: SweepOptions, manifest: Manifest) -> None:
        self.store = store
        first_columns = {"step": pl.Int64, "cell": pl.String}
        self.rows = {
            name: Journal(store, ENTRY, f"{JOURNAL}_{name}", {**first_columns, **columns}, manifest)
            for name, columns in columns_of(options).items()
        }
        self.status = Journal(store, ENTRY, JOURNAL, STATUS, manifest)
        self.step = max((journal.last or 0) for journal in (self.status, *self.rows.values()))
        self.ended = {row["cell"]: row for row in read(store.folder).table(JOURNAL).iter_rows(named=True)}
        """The row of `status` of each cell that has ended, by its key."""

    def has(self, key: str) -> bool:
        """True if a cell needs no further attempt: it has rows, or would fail again."""
        return key in self.ended and bool(self.ended[key]["lasting"])

    def add(self, key: str, outcome: CellOutcome) -> None:
        """Append the rows of a cell, then its status: a cell counts as ended once its status is on disk."""
        self.step += 1
        marks = pl.lit(self.step, pl.Int64).alias("step"), pl.lit(key).alias("cell")
        for name, table in outcome.tables.items():
            self.rows[name].append(self.step, table.select(*marks, pl.all()))
        values = self.step, key, outcome.reason, outcome.lasting, outcome.seconds
        row = dict(zip(STATUS, values, strict=True))
        self.status.append(self.step, pl.DataFrame([row], schema=STATUS))
        self.ended[key] = row

    def gather(self) -> None:
        """Turn the lines that were appended since the last call into Parquet."""
        for journal in (*self.rows.values(), self.status):
            journal.gather()

    def table(self, name: str) -> pl.DataFrame:
        """The rows of each cell's last attempt, in the order in which they were written (`at`)."""
        rows = read(self.store.folder).table(f"{JOURNAL}_{name}").with_row_index("at")
        last = pl.DataFrame(list(self.ended.values()), schema=STATUS).select("cell", "step")
        return rows.join(last, on=["cell", "step"], how="semi")


def _tables(spec: Spec, keys: list[str], journal: CellJournal) -> dict[str, pl.DataFrame]:
    """The tables of a sweep, made from its journal, with cells in the order of the specification."""
    factors = factors_frame(spec)
    ended = [journal.ended.get(key, {}) for key in keys]
    cells = factors.with_columns(
        pl.Series("done", [bool(row) for row in ended]),
        pl.Series("reason", [row.get("reason") for row in ended], pl.String),
        pl.Series("seconds", [row.get("seconds") for row in ended], pl.Float64),
    )
    tables = {"cells": cells}
    keyed_factors = factors.with_columns(pl.Series("key", keys, pl.String))
    for name in journal.rows:
        rows = journal.table(name).rename({"cell": "key"}).drop("step")
        # Rows of a cell stay in the order in which they were measured.
        joined = keyed_factors.join(rows, on="key", how="inner").sort("cell", "at")
        tables[name] = joined.drop("key", "at")
    return tables


def factors_frame(spec: Spec) -> pl.DataFrame:
    """Each cell's number and factors; a factor that is a word in some cell becomes a word in all."""
    columns = {"cell": pl.Series(range(len(spec.cells)), dtype=pl.Int64)}
    for name in spec.factors:
        values = [cell.get(name) for cell in spec.cells]
        types = {type(value) for value in values if value is not None}
        if len(types) > 1 and types != {int, float}:
            values = [None if value is None else str(value) for value in values]
        columns[name] = pl.Series(values, dtype=pl.Float64 if types <= {int, float} and float in types else None)
    return pl.DataFrame(columns)

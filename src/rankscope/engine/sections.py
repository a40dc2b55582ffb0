"""A sweep that has been run, and what is shown of it: a metric in small multiples, factor by factor, every cell."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations
from pathlib import Path
from typing import Any, ClassVar

import polars as pl

from rankscope.engine.spec import JOBS, SHIPPED, level_name
from rankscope.engine.views import CELLS, NEEDED, NOTHING, SweepView, sweep_curves_chart, sweep_levels_chart, view_of
from rankscope.engine.work import READINGS
from rankscope.errors import FileError, require_one_of
from rankscope.extras import counted, listed
from rankscope.figures import Chart
from rankscope.metrics import symbol_of
from rankscope.profiles import SCHEMA
from rankscope.results import Plot, Result, Section, Table, sentence
from rankscope.runs import Manifest, Run

ENDS, ROWS, REASONS, WAYS = 5, 1000, 50, 4
"""Cells at either end, rows of the table, reasons of failures, and ways to arrange the curves, at most."""


@dataclass(frozen=True, eq=False, repr=False)
class Sweep(Result):
    """A sweep that has been run: its tables."""

    kind = "sweep"
    schemas: ClassVar = {
        "sweep": {"cell": pl.Int64, **{name: SCHEMA[name] for name in READINGS}},
        "cells": {"cell": pl.Int64, "done": pl.Boolean, "reason": pl.String, "seconds": pl.Float64},
        **{job.table: {"cell": pl.Int64, **job.columns} for job in SHIPPED},
    }  # and in each a column for each factor
    optional = tuple(job.table for job in SHIPPED)
    grows = True
    table: pl.DataFrame  # All rows of `measure`, a column for each factor
    cells: pl.DataFrame  # A row for each cell: `cell` (its number), factors, `done`, `reason`, `seconds`
    manifest: Manifest
    further: Mapping[str, pl.DataFrame] = field(default_factory=dict)  # Of jobs, such as `sweep_paths`
    run: Path = Path()  # The folder
    notes: tuple[str, ...] = ()

    @property
    def tables(self) -> Mapping[str, pl.DataFrame]:
        """Rows, cells, and what else was asked for."""
        return {"sweep": self.table, "cells": self.cells, **self.further}

    @classmethod
    def made_of(cls, tables: Mapping[str, pl.DataFrame], manifest: Manifest, details: Mapping[str, Any]) -> "Sweep":
        """The sweep of these tables."""
        further = {name: table for name, table in tables.items() if name not in ("sweep", "cells")}
        return cls(tables["sweep"], tables["cells"], manifest, further)

    @classmethod
    def of_run(cls, run: Run, entry: str) -> "Sweep":
        """The sweep in a run folder; what is shown of it checks its tables."""
        jobs = {job.table for job in JOBS.values()}
        tables = {name: run.table(name) for name in ("sweep", "cells", *sorted(jobs)) if name in run.names}
        manifest = run.manifests.get(entry, Manifest())
        return replace(cls._made(tables, manifest, {}, f"{run.folder} must hold a"), run=run.folder)

    @property
    def factors(self) -> list[str]:
        """All factors, in the order of the specification."""
        return list(self.manifest.more.get("factors", ()))

    @property
    def varied(self) -> list[str]:
        """The factors that differ between cells."""
        return list(self.manifest.more.get("varied", ()))

    @property
    def failed(self) -> pl.DataFrame:
        """The cells without numbers, with their `reason`."""
        return self.cells.filter(pl.col("reason").is_not_null())

    def view(self, metric: str | None = None) -> SweepView:
        """What is shown of a metric, the first if left out."""
        where, varied = self.run, self.manifest.more.get("varied")
        missing = NEEDED["sweep"] - set(self.table.columns)
        missing |= (NEEDED["cells"] | set(varied or ())) - set(self.cells.columns)
        if missing or varied is None:
            lacking = ", ".join(sorted(missing)) or "their manifest"
            raise FileError(f"{where} must hold a sweep; its tables lack {lacking}: run `rankscope sweep` again")
        metrics = self.metrics or self.table["metric"].unique().to_list()
        name = metrics[0] if metric is None else metric
        require_one_of(f"a metric of {where}", name, metrics, FileError, "metric")
        return view_of(self.table.filter(metric=name), self.cells, name, varied)

    @property
    def metrics(self) -> list[str]:
        """The metrics that were asked for, in that order."""
        return list(self.manifest.more.get("asked", {}).get("metrics", []))

    @cached_property
    def views(self) -> dict[str, SweepView]:
        """What a page shows of every metric; it is about the first."""
        first = self.view()
        names = self.metrics or [first.metric]
        return {name: first if name == first.metric else self.view(name) for name in names}

    @property
    def title(self) -> str:
        """How many cells have numbers."""
        done, failed = int(self.cells["done"].sum()), len(self.failed)
        return f"Sweep: {done - failed} of {counted(len(self.cells), 'cell')}, {failed} failed, in {self.run}"

    def charts(self, metric: str | None = None) -> list[Chart]:
        """A metric (the first, if left out) by layer in small multiples and, below, by factor at the last layer."""
        view = self.view(metric)
        both = [sweep_curves_chart(view, *view.arranged, most=4), sweep_levels_chart(view, most=4)]
        return [chart for chart in both if chart.panels]

    def overview(self) -> Section:
        """What came of it: the ends, what matters, what failed."""
        view = self.view()
        if not len(view.cells):
            return Section(self.title, self._sentences())
        plots = [Plot("sweep", [("", chart)]) for chart in self.charts()]
        return Section(self.title, self._sentences(), plots, [ends_table(view)])

    def sections(self) -> list[Section]:
        """By layer, factor by factor, every cell, and what failed."""
        view = next(iter(self.views.values()))
        sections = []
        if len(view.cells):
            lead = f"{counted(len(view.cells), 'cell')}; what differs is {listed(view.varied) or 'nothing'}."
            sections.append(Section("By layer, in small multiples", lead, [_curves(self.views)], key="sweep"))
            if view.varied:
                levels = _levels(self.views)
                sections.append(Section("Factor by factor, at the last layer", plots=[levels], key="factors"))
            sections.append(Section("Cells", tables=[ends_table(view), _cells(self.views)]))
        if len(self.failed):
            sections.append(Section("Failures", tables=[_failures(self.failed, view.varied)]))
        return sections

    def _sentences(self) -> str:
        """What came of it, as a page says it."""
        view, done = next(iter(self.views.values())), int(self.cells["done"].sum())
        known = _in_order(view)
        sentences = []
        if len(known):
            rows = map(int, known["row"][[0, -1]])
            floor = {True: ", at or below its floor", False: ""}
            noise = view.cells["noise"]
            ends = [f"{view.shown(view.ends[row])} ({view.described(row)}{floor[noise[row]]})" for row in rows]
            sentences.append(f"At the last layer {view.metric} goes from {ends[0]} to {ends[1]}.")
        effects = list(view.effects.items())
        if effects and effects[0][1] > 0:
            name, share = effects[0]
            sentences.append(f"What matters most is {name}: alone it accounts for {share:.0%} of the differences.")
        if len(self.failed):
            sentences.append(f"{counted(len(self.failed), 'cell')} of {len(self.cells)} failed.")
        if done < len(self.cells):
            sentences.append(f"{done} of {len(self.cells)} cells are done so far.")
        return " ".join(sentences) or "No cell was measured."


def _curves(views: Mapping[str, SweepView]) -> Plot:
    """By layer, arranged in several ways, and the other metrics as the first is."""
    view, *further = views.values()
    usual = view.arranged
    matter = [name for name, share in view.effects.items() if share >= NOTHING]
    ways = [usual, *(pair for pair in permutations(matter, 2) if pair != usual)][:WAYS]
    plots = [
        (f"{ink} in panels of {panel}" if panel else str(ink or ""), sweep_curves_chart(view, ink, panel))
        for ink, panel in ways
    ]
    plots += [(rest.metric.replace("_", " "), sweep_curves_chart(rest, *usual)) for rest in further]
    return Plot("sweep", plots, sentence("sweep", "curves", symbol=symbol_of(view.metric)))


def _levels(views: Mapping[str, SweepView]) -> Plot:
    """Factor by factor, a plot of each metric."""
    cells = len(next(iter(views.values())).cells)
    few = f" Drawn are {CELLS} of {cells} cells." if cells > CELLS else ""
    plots = [(name.replace("_", " "), sweep_levels_chart(view)) for name, view in views.items()]
    return Plot("factors", plots, sentence("sweep", "factors", few=few))


def ends_table(view: SweepView) -> Table:
    """The cells where tokens are nearest to uniform, and those where they are farthest apart."""
    known = _in_order(view)
    size = min(ENDS, len(known) // 2) or len(known)
    parts = [("least", known.head(size)), ("most", known.tail(size).reverse())]
    rows = [
        [which, str(row["cell"]), *(_word(row[name]) for name in view.varied), view.shown(view.ends[row["row"]])]
        for which, part in parts[: 2 if len(known) > 1 else 1]
        for row in part.iter_rows(named=True)
    ]
    marked = _noise(view, [int(row) for _, part in parts for row in part["row"]], len(view.varied) + 2)
    lost = len(view.cells) - len(known)
    notes = ["At the last layer, the mean over samples.", "○ at or below the floor." if marked else ""]
    notes.append(f"{counted(lost, 'cell')} without a number, as after an overflow." if lost else "")
    headings = ["", "cell", *view.varied, view.metric]
    return Table(f"Least and most {view.metric}", headings, rows, marked, " ".join(filter(None, notes)))


def _cells(views: Mapping[str, SweepView]) -> Table:
    """Every cell that was measured."""
    view = next(iter(views.values()))
    some = range(min(len(view.cells), ROWS))
    ends = [(shown, dict(zip(shown.cells["cell"], shown.ends.tolist(), strict=True))) for shown in views.values()]
    rows, keys = [], []
    for row in some:
        cell = view.cells.row(row, named=True)
        factors = [cell[name] for name in view.varied]
        shown, numbers = zip(*(_shown(metric, known.get(cell["cell"])) for metric, known in ends), strict=True)
        rows.append([str(cell["cell"]), *map(_word, factors), *shown, f"{cell['seconds']:.2f}"])
        keys.append([cell["cell"], *factors, *numbers, cell["seconds"]])
    note = "At the last layer. A click on a heading sorts by it, another turns the order about."
    if len(view.cells) > ROWS:
        note += f" The first {ROWS} of {len(view.cells)}; all are in cells.parquet and sweep.parquet."
    marked = _noise(view, list(some), len(view.varied) + 1)
    note += " ○ at or below the floor." if marked else ""
    headings = ["cell", *view.varied, *views, "seconds"]
    return Table("All cells", headings, rows, marked, note, keys=keys)


def _failures(failed: pl.DataFrame, varied: list[str]) -> Table:
    """By reason: how many cells, and one of them."""
    groups = failed.group_by("reason", maintain_order=True).agg(
        pl.len().alias("number"), pl.col("cell").first(), *(pl.col(name).first() for name in varied)
    )
    rows = []
    for row in groups.sort("number", descending=True, maintain_order=True).head(REASONS).iter_rows(named=True):
        factors = ", ".join(f"{name} {_word(row[name])}" for name in varied if row[name] is not None)
        rows.append([f"{counted(row['number'], 'cell')}, as {row['cell']} ({factors})", str(row["reason"])])
    note = f"The first {REASONS} of {len(groups)} reasons." if len(groups) > REASONS else ""
    return Table("", ["which", "why"], rows, note=note, wordy=True)


def _in_order(view: SweepView) -> pl.DataFrame:
    """The cells that have a number, the least first, with the `row` of each."""
    return view.cells.with_row_index("row").filter(pl.col("log10").is_not_nan()).sort("log10", "cell")


def _noise(view: SweepView, rows: list[int], column: int) -> set[tuple[int, int]]:
    return {(k, column) for k, row in enumerate(rows) if view.cells["noise"][row]}


def _shown(view: SweepView, end: float | None) -> tuple[str, float | None]:
    """A number as a page shows it, and what it is sorted by."""
    if end is None or math.isnan(end):
        return "–", None
    return view.shown(end), end


def _word(value: Any) -> str:
    return "–" if value is None else level_name(value)

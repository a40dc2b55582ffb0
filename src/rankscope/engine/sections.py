"""What a sweep is shown as: a metric in small multiples, factor by factor, every cell in a table to sort."""

import math
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import polars as pl

from rankscope.engine.factors import level_name
from rankscope.engine.figures import CELLS, NOTHING, sweep_curves_chart, sweep_levels_chart
from rankscope.engine.views import SweepView
from rankscope.extras import counted, listed
from rankscope.metrics import symbol_of
from rankscope.results import Plot, Section, Table, sentence

ENDS, ROWS, REASONS, WAYS = 5, 1000, 50, 4
"""Cells at either end, rows of the table, reasons of failures, and ways to arrange the curves, at most."""


@dataclass(frozen=True, eq=False)
class Swept:
    """What is shown of a sweep."""

    views: dict[str, SweepView]  # By metric
    failed: pl.DataFrame  # `cell`, factors, `reason`
    cells: int
    done: int

    @property
    def first(self) -> SweepView:
        """The metric that the page is about."""
        return next(iter(self.views.values()))


def sweep_sentences(swept: Swept) -> str:
    """What came of it: the ends, what matters, what failed."""
    view = swept.first
    known = view.cells.with_row_index("row").filter(pl.col("log10").is_not_nan()).sort("log10", "cell")
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
    if len(swept.failed):
        sentences.append(f"{counted(len(swept.failed), 'cell')} of {swept.cells} failed.")
    if swept.done < swept.cells:
        sentences.append(f"{swept.done} of {swept.cells} cells are done so far.")
    return " ".join(sentences) or "No cell was measured."


def sweep_sections(swept: Swept) -> list[Section]:
    """What the page shows of it."""
    view = swept.first
    sections = []
    if len(view.cells):
        lead = f"{counted(len(view.cells), 'cell')}; what differs is {listed(view.varied) or 'nothing'}."
        sections.append(Section("By layer, in small multiples", lead, [_curves(swept)], key="sweep"))
        if view.varied:
            sections.append(Section("Factor by factor, at the last layer", plots=[_levels(swept)], key="factors"))
        sections.append(Section("Cells", tables=[ends_table(view), _cells(swept)]))
    if len(swept.failed):
        sections.append(Section("Failures", tables=[_failures(swept)]))
    return sections


def _curves(swept: Swept) -> Plot:
    view = swept.first
    usual = view.arranged
    matter = [name for name, share in view.effects.items() if share >= NOTHING]
    ways = [usual, *(pair for pair in permutations(matter, 2) if pair != usual)][:WAYS]
    views = [
        (f"{ink} in panels of {panel}" if panel else str(ink or ""), sweep_curves_chart(view, ink, panel))
        for ink, panel in ways
    ]
    further = [rest for rest in swept.views.values() if rest is not view]
    views += [(rest.metric.replace("_", " "), sweep_curves_chart(rest, *usual)) for rest in further]
    return Plot("sweep", views, sentence("sweep", "curves", symbol=symbol_of(view.metric)))


def _levels(swept: Swept) -> Plot:
    cells = len(swept.first.cells)
    few = f" Drawn are {CELLS} of {cells} cells." if cells > CELLS else ""
    views = [(name.replace("_", " "), sweep_levels_chart(view)) for name, view in swept.views.items()]
    return Plot("factors", views, sentence("sweep", "factors", few=few))


def ends_table(view: SweepView) -> Table:
    """The cells where tokens are nearest to uniform, and those where they are farthest apart."""
    known = view.cells.with_row_index("row").filter(pl.col("log10").is_not_nan()).sort("log10", "cell")
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


def _cells(swept: Swept) -> Table:
    """Every cell that was measured."""
    view = swept.first
    some = range(min(len(view.cells), ROWS))
    ends = [(shown, dict(zip(shown.cells["cell"], shown.ends.tolist(), strict=True))) for shown in swept.views.values()]
    rows, keys = [], []
    for row in some:
        cell = view.cells.row(row, named=True)
        numbers = [_shown(metric, known.get(cell["cell"])) for metric, known in ends]
        rows.append([
            str(cell["cell"]), *(_word(cell[name]) for name in view.varied),
            *(shown for shown, _ in numbers), f"{cell['seconds']:.2f}",
        ])  # fmt: skip
        keys.append([
            cell["cell"], *(cell[name] for name in view.varied), *(key for _, key in numbers),
            cell["seconds"],
        ])  # fmt: skip
    note = "At the last layer. A click on a heading sorts by it, another turns the order about."
    if len(view.cells) > ROWS:
        note += f" The first {ROWS} of {len(view.cells)}; all are in cells.parquet and sweep.parquet."
    marked = _noise(view, list(some), len(view.varied) + 1)
    note += " ○ at or below the floor." if marked else ""
    headings = ["cell", *view.varied, *swept.views, "seconds"]
    return Table("All cells", headings, rows, marked, note, keys=keys)


def _failures(swept: Swept) -> Table:
    """By reason: how many cells, and one of them."""
    varied = swept.first.varied
    groups = swept.failed.group_by("reason", maintain_order=True).agg(
        pl.len().alias("number"), pl.col("cell").first(), *(pl.col(name).first() for name in varied)
    )
    rows = []
    for row in groups.sort("number", descending=True, maintain_order=True).head(REASONS).iter_rows(named=True):
        factors = ", ".join(f"{name} {_word(row[name])}" for name in varied if row[name] is not None)
        rows.append([f"{counted(row['number'], 'cell')}, as {row['cell']} ({factors})", str(row["reason"])])
    note = f"The first {REASONS} of {len(groups)} reasons." if len(groups) > REASONS else ""
    return Table("", ["which", "why"], rows, note=note, wordy=True)


def _noise(view: SweepView, rows: list[int], column: int) -> set[tuple[int, int]]:
    return {(k, column) for k, row in enumerate(rows) if view.cells["noise"][row]}


def _shown(view: SweepView, end: float | None) -> tuple[str, float | None]:
    """A number as a page shows it, and what it is sorted by."""
    if end is None or math.isnan(end):
        return "–", None
    return view.shown(end), end


def _word(value: Any) -> str:
    return "–" if value is None else level_name(value)

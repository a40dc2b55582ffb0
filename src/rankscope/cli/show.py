"""How the command line shows things: one console, progress on stderr, curves as sparklines."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table

from rankscope.cli.inputs import fallback_lines, random_weights_lines
from rankscope.cli.options import CONTROLS, PrintOptions

if TYPE_CHECKING:
    from rankscope.profiles import Profile, Summary
    from rankscope.results import Table as SectionTable

MOST_ROWS, FOLDED, SHORT = 48, 24, 70  # Rows of a table at most, characters above which a cell or a caption breaks
SILENCE = 30.0  # Seconds of work after which a line says how far it is, where stderr is no terminal


class Interruption(KeyboardInterrupt):
    """Ctrl-C, raised after the finished part was shown and written; its message says what that is."""


class _PlainText(Console):
    """The console of every command: text from a folder, a model or a file stays text.

    Brackets in it are no colours, `:a:` is no emoji, and control characters, escape codes among them, are left out.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, emoji=False, markup=False, **options)

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """What is printed, piece by piece; codes that rich itself sends are in a piece's style, not in its text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=CONTROLS.sub("", segment.text))

    def on_broken_pipe(self) -> None:
        """Let `app` end the command: rich would leave by itself, with exit code 1."""
        raise BrokenPipeError


def console() -> Console:
    """The console on stdout, for results."""
    return _PlainText()


def complain(sentence: str) -> None:
    """Print one line on stderr, unbroken at any width."""
    _PlainText(stderr=True, soft_wrap=True).print(f"rankscope: {' '.join(sentence.split())}")


def say(*lines: str) -> None:
    """Print sentences as they are, wrapped to the terminal."""
    for line in lines:
        console().print(line)


def say_where(what: str, path: Path | None) -> None:
    """Print where something is, on a line of its own that no terminal breaks."""
    console().print(f"{what}: {path}", soft_wrap=True)


def say_report(report: Path | None, printing: PrintOptions, also: str = "") -> None:
    """Say where the report is, and what lies beside it, unless there is none or hints are left out."""
    if report is not None and not printing.quiet:
        say("")
        if also:
            say_where(also, report.parent)
        say_where("Report", report)


def show_run(
    run: "Profile | Summary",
    metric: str,
    sentences: Sequence[str],
    report: Path | None,
    printing: PrintOptions,
    threshold: float | None = None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Print a run: a table of one metric's curves, sentences about them, and where the report is; or as JSON.

    In JSON, `more` stands beside manifest and table. Below `threshold` tokens count as uniform: a column says where.
    """
    from rankscope.profiles import ends_table

    if printing.as_json:
        manifest = run.manifest.to_dict()
        return machine({"manifest": manifest, **(more or {}), "table": run.table.to_dicts()})
    ends = ends_table(run.views(metric), threshold)
    show_tables(replace(ends, headings=["variant", *ends.headings[1:]]), *run.spread(metric))
    say(*random_weights_lines(run.manifest), *fallback_lines(run), "", *sentences)
    say_report(report, printing)


def machine(value: Any) -> None:
    """Print JSON on stdout; NaN and infinity, which JSON does not know, become null."""
    text = json.dumps(_plain(value), ensure_ascii=False)
    sys.stdout.write(CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


Tell = Callable[[int, int], None]  # Called with how much of a step is done, and of how much
Bar = Callable[..., None]
"""Called as `bar(done, total, description)`: `total` is None if it is not known, the description may be left out."""


class ProgressBars:
    """Makes progress bars: `bar = start("bert-base, san")`, then `bar(done, total)`."""

    def __init__(self, bars: Progress) -> None:
        self.bars = bars

    def __call__(self, description: str) -> Bar:
        """Start a new bar, whose length is not known yet."""
        task = self.bars.add_task(description, total=None)

        def bar(done: int, total: int | None, description: str | None = None) -> None:
            self.bars.update(task, completed=done, total=total, description=description)

        return bar

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hide the bars while results are printed to the same terminal."""
        if self.bars.disable:
            yield
            return
        self.bars.stop()
        try:
            yield
        finally:
            self.bars.start()


@contextmanager
def progress(quiet: bool) -> Iterator[ProgressBars]:
    """Progress bars on stderr if that is a terminal; if not, a line now and then that says how far it is."""
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn(), TextColumn("left", "dim"),
        TimeRemainingColumn(),
    )  # fmt: skip
    out, ended = _PlainText(stderr=True), Event()
    # Rich would send what is printed meanwhile to stderr, with the bars.
    with Progress(
        *columns, console=out, transient=True, redirect_stdout=False, disable=quiet or not out.is_terminal
    ) as bars:
        if not quiet and not out.is_terminal:
            Thread(target=_break_silence, args=(bars, ended), daemon=True).start()
        try:
            yield ProgressBars(bars)
        finally:
            ended.set()


def _break_silence(bars: Progress, ended: Event) -> None:
    """Say how far the last bar is, again and again until the work has ended."""
    begun = time.monotonic()
    while not ended.wait(SILENCE):
        for task in bars.tasks[-1:]:
            share = f"{task.percentage:.0f}% done" if task.total else "at work"
            complain(f"{task.description or 'this'}: {share} after {time.monotonic() - begun:.0f} seconds")


@contextmanager
def steps(quiet: bool, weights: Sequence[float]) -> Iterator[Callable[[str], Tell]]:
    """One bar for work in several steps, each with its share of the time.

    `tell = step("san")` begins the next step, and `tell(done, total)` shows how far it is.
    """
    total_weight, resolution = sum(weights) or 1.0, 1000
    with progress(quiet) as start:
        bar = start("")
        begun: list[float] = []

        def step(description: str) -> Tell:
            before, weight = sum(begun), weights[len(begun)]
            begun.append(weight)

            def tell(done: int, total: int) -> None:
                share = (before + weight * done / max(total, 1)) / total_weight
                bar(round(resolution * share), resolution, description)

            tell(0, 1)
            return tell

        yield step


def titled(title: str, caption: str = "", words: Sequence[str] = (), numbers: Sequence[str] = ()) -> Table:
    """A table with columns of words, which fold, and of numbers, which do not.

    It is as wide as its title at least, and short lines of its caption, where the terminal is: they read badly broken.
    """
    widest = max(len(line) for line in (title, *caption.split("\n")) if line == title or len(line) < SHORT)
    table = Table(
        title=title, title_justify="left", caption=caption or None, caption_justify="left", box=None,
        min_width=min(widest, console().width),
    )  # fmt: skip
    for heading in words:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def show_tables(*tables: "SectionTable") -> None:
    """Print tables of sections, an empty line between them; see `tabular`."""
    for index, table in enumerate(tables):
        say(*([""] if index else []))
        console().print(tabular(table))


def tabular(table: "SectionTable", curves_at: int = 1) -> Table:
    """A table of a section for the terminal: words fold, numbers do not, curves are a column at `curves_at`.

    Where there is little room, columns that the table can spare are left out; of too many rows some are shown, evenly.
    """
    from rankscope.figures import thinned

    rows = [
        [f"{cell}{' ○' * ((row, column) in table.marked)}" for column, cell in enumerate(cells)]
        for row, cells in enumerate(table.rows)
    ]
    headings, (of_curves, curves) = [*table.headings], table.curves
    if curves:
        for cells, curve in zip((headings, *rows), (of_curves, *curves), strict=True):
            cells.insert(curves_at, curve)
    note = "\n".join(filter(None, [table.note, f"{MOST_ROWS} of {len(rows)} rows." * (len(rows) > MOST_ROWS)]))
    columns = [(heading, [row[k] for row in thinned(rows, MOST_ROWS)]) for k, heading in enumerate(headings)]
    widths = {
        heading: max(len(line) for cell in (heading, *of) for line in cell.split("\n")) for heading, of in columns
    }
    for heading in table.spare:
        if sum(2 + min(width, FOLDED) for width in widths.values()) > console().width:
            widths.pop(heading, None)
    shown = [(heading, cells) for heading, cells in columns if heading in widths]
    made = titled(table.title, note)
    made.title = table.title or None
    for index, (heading, cells) in enumerate(shown):
        numbers = all(cell.lstrip("+-").isdigit() for cell in cells) or (index > 0 and widths[heading] <= FOLDED)
        if numbers and heading != of_curves:
            made.add_column(heading, justify="right", no_wrap=True)
        else:
            made.add_column(heading, no_wrap=heading == of_curves, overflow="fold")
    for row in zip(*(cells for _, cells in shown), strict=True):
        made.add_row(*row)
    return made

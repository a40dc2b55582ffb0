"""How the command line shows things: one console, progress on stderr, curves as sparklines."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from rankscope.cli.inputs import fallback_lines, random_weights_lines
from rankscope.cli.names import CONTROLS
from rankscope.cli.options import PrintOptions

if TYPE_CHECKING:
    from rankscope.profiles import CurveView, Profile, Summary

T = TypeVar("T")
BLOCKS = "▁▂▃▄▅▆▇█"
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


def say_report(report: Path, printing: PrintOptions, also: str = "") -> None:
    """Say where the report is, and what lies beside it, unless hints are left out."""
    if not printing.quiet:
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

    Args:
        run: What was measured.
        metric: The metric of the table.
        sentences: Said below the table.
        report: The path of the report; None if there is none.
        printing: Whether as JSON, and whether hints are left out.
        threshold: Below it tokens count as uniform; adds a column.
        more: In JSON, further entries beside the manifest and the table.
    """
    if printing.as_json:
        manifest = run.manifest.to_dict()
        return machine({"manifest": manifest, **(more or {}), "table": run.table.to_dicts()})
    console().print(curves_table(run.views(metric), threshold))
    say(*random_weights_lines(run.manifest), *fallback_lines(run), "", *sentences)
    if report:
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


def sparkline(values: Sequence[float | None], limits: tuple[float, float] | None = None) -> str:
    """One character per value, from the lowest (or 0) to the highest; a gap where there is none.

    >>> sparkline([1.0, 0.5, 0.0])
    '█▅▁'
    """
    low, high = limits or _limits(values)
    span = high - low or 1.0
    return "".join(BLOCKS[round((value - low) / span * 7)] if _is_finite(value) else " " for value in values)


def sparklines(*logs: Sequence[float | None]) -> list[str]:
    """Several curves of log10 on one scale.

    >>> sparklines([0.0, -4.0], [0.0, -2.0])
    ['█▁', '█▅']
    """
    curves = [thinned(curve) for curve in logs]
    flat = [value for curve in curves for value in curve]
    heights = scaled_for_sparkline(flat, len(flat))
    limits, rest = _limits(heights), iter(heights)
    return [sparkline([*islice(rest, len(curve))], limits) for curve in curves]


def _limits(values: Sequence[float | None]) -> tuple[float, float]:
    known = [0.0, *filter(_is_finite, values)]
    return min(known), max(known)


def thinned(values: Sequence[T], most: int = 13) -> Sequence[T]:
    """At most `most` of the values, evenly spread, the first and the last among them."""
    if len(values) <= most:
        return values
    return [values[k * (len(values) - 1) // (most - 1)] for k in range(most)]


def scaled_for_sparkline(logs: Sequence[float | None], most: int = 13) -> list[float]:
    """Heights for a sparkline: values over up to two decades, logs over up to fifty, else logs of logs."""
    thin = [k if _is_finite(k) else math.nan for k in thinned(logs, most)]
    known = [k for k in thin if math.isfinite(k)]
    span = max(known) - min(known) if known else 0.0
    if span < 2:
        top = max(known, default=0.0)  # a sparkline has no unit: values beyond floating point are drawn too
        return [10.0 ** (k - top) for k in thin]
    if span < 50:
        return thin
    return [math.copysign(math.log1p(abs(k)), k) for k in thin]


def _is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def titled(title: str, caption: str = "", words: Sequence[str] = (), numbers: Sequence[str] = ()) -> Table:
    """A table with columns of words, which fold, and of numbers, which do not.

    It is as wide as its title at least, where the terminal is: a title that breaks reads badly.
    """
    widest = max(len(line) for line in (title, *caption.split("\n")))
    table = Table(
        title=title, title_justify="left", caption=caption or None, caption_justify="left", box=None,
        min_width=min(widest, console().width),
    )  # fmt: skip
    for heading in words:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def curves_table(curves: "Sequence[CurveView]", threshold: float | None = None) -> Table:
    """A line for each curve: its shape, its ends, and the layer from which on it is below its floor.

    Of a corpus quartiles stand beneath the ends; with a threshold, there is the layer from which on tokens
    are uniform.
    """
    from rankscope.figures import power
    from rankscope.metrics import is_share, symbol_of
    from rankscope.profiles import zeros_note

    metric, several = curves[0].metric, len({curve.arithmetic for curve in curves}) > 1
    median = all(len(curve.log10_bands) > 1 for curve in curves)
    threshold = threshold if is_share(metric) else None
    depths = len({curve.depth for curve in curves}) > 1
    notes = ["Beneath each median the quartiles." if median else "", zeros_note(curves)]
    notes += [] if threshold is None else [f"uniform: below {threshold:g} from that layer on"]
    title = f"{metric}: {symbol_of(metric)}, {curves[0].statistic}"
    table = titled(title, "\n".join(filter(None, notes)))
    noisy = any(curve.floor_from is not None for curve in curves)
    few = several or (noisy and threshold is not None)
    apart = several and threshold is None  # where there is more to say, arithmetics stand with the names
    table.add_column("variant", overflow="fold")
    if apart:
        table.add_column("arithmetic", no_wrap=True)
    table.add_column(f"layers {curves[0].first} →", no_wrap=True)
    for heading in ("first", "last") if few else ("first", "middle", "last"):
        table.add_column(heading, justify="right", no_wrap=True)
    columns = (("layers", depths), ("uniform", threshold is not None), ("at floor", noisy))
    for heading, shown in columns:
        if shown:
            table.add_column(heading, no_wrap=True)
    for curve in curves:
        first, middle = curve.first, (curve.first + curve.depth + 1) // 2
        cells = []
        for layer in (first, curve.depth) if few else (first, middle, curve.depth):
            low, high = (power(float(side[layer])) for side in curve.log10_bands[-1]) if median else ("", "")
            line = "\n" if len(low) + len(high) > 12 else ""
            cells.append(Text.assemble(power(float(curve.log10[layer])), (f"\n{low}–{line}{high}" * median, "dim")))
        uniform = None if threshold is None else curve.uniform_from(threshold)
        table.add_row(
            curve.variant if apart else curve.name,
            *([curve.arithmetic] if apart else []),
            sparkline(scaled_for_sparkline(curve.log10[first:].tolist())),
            *cells,
            *([str(curve.depth)] if depths else []),
            *([] if threshold is None else ["no" if uniform is None else f"from {uniform}"]),
            *(["" if curve.floor_from is None else f"from {curve.floor_from}"] if noisy else []),
        )
    return table

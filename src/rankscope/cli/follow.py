"""`rankscope follow`: a training run in the terminal, or on a page, while it trains. `rankscope spikes`: its loss
spikes, and which signals moved before them."""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rankscope.cli import options as opt
from rankscope.cli.inputs import command_line, split_names
from rankscope.cli.show import console, machine, say, say_where, show_tables, tabular
from rankscope.extras import counted, need
from rankscope.plugins import Group

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table as RichTable

    from rankscope.trainings import Grid, TrainingRun

EVERY = 1.0  # Seconds between two readings of the folder
WIDTH, LAYERS, ALARMS = 32, 33, 6  # Characters of a sparkline, layers of a table and alarms that are shown, at most


SHIPPED: dict[str, Callable[..., None]] = {}  # Pages are served by rankscope-explorer
PAGES: Group[Callable[..., None]] = Group("pages", "a function", callable, lambda each: each.__name__)
"""By the name of a command, what serves its page: a function of the command's own arguments."""


@dataclass(frozen=True)
class FollowPage(opt.PageOptions):
    """Options that show the run on a page instead."""

    page: Annotated[
        bool, opt.option(opt.PAGE, " ", "Show the run on a local page that updates itself.", (), "--page")
    ] = False


def follow(
    runs: Annotated[list[Path], opt.argument("RUN", "monitored")],
    metric: Annotated[str | None, opt.option(opt.RESULT, "NAMES", "followed", show_default="the first")] = None,
    once: Annotated[bool, opt.option(opt.RESULT, " ", "Print the run once and exit.", (), "--once")] = False,
    paging: FollowPage = FollowPage(),
    printing: opt.PrintOptions = opt.PrintOptions(),
) -> None:
    """Follow a training run while it trains: its layers from first to last measurement, loss, alarms.

    It reads what a [bold]Monitor[/bold] or [bold]rankscope checkpoints[/bold] writes, and disturbs neither.
    Ctrl-C ends it. Several runs are shown one below another, or on one page, side by side and each by itself.
    """
    from rankscope.trainings import read_training

    trainings = {run: read_training(run) for run in runs}
    names = {run: _names(training, metric) for run, training in trainings.items()}
    if paging.page:
        need("a page", "rankscope_explorer", "fastapi", "uvicorn", "plotly")
        return PAGES["follow"](runs, next(iter(names[runs[0]]), None), paging, printing)
    if printing.as_json:
        answers = [described(training, names[run]) for run, training in trainings.items()]
        return machine(answers[0] if len(runs) == 1 else answers)
    out = console()
    if not once and out.is_terminal and sys.stdout.isatty():
        return _live(runs, metric, printing.quiet)
    for run, training in trainings.items():
        out.print(shown(training, names[run], printing.quiet), *([""] if run != runs[-1] else []))


def _names(training: "TrainingRun", metrics: str | None) -> list[str]:
    """The metrics asked for, or the first; one that a run has of several stacks of blocks is one of each."""
    if metrics is None:
        return training.of_stacks(training.metrics[0]) if training.metrics else []
    asked = {name: name not in training.metrics for name in split_names("metric", metrics)}
    readings = [training.of_stacks(name) * many or [training.metric(name)] for name, many in asked.items()]
    return [metric for metrics_of_stacks in readings for metric in metrics_of_stacks]


def _live(runs: list[Path], metric: str | None, quiet: bool) -> None:
    """Show the runs in the terminal, and again whenever one has grown, until Ctrl-C."""
    from rich.console import Group
    from rich.live import Live

    from rankscope.trainings import TrainingRun, read_training, stamp

    out = console()
    marks, trainings = dict[Path, str](), dict[Path, TrainingRun]()
    with suppress(KeyboardInterrupt), Live(console=out, auto_refresh=False) as live:
        while True:
            for run in runs:
                if (now := stamp(run)) != marks.get(run):
                    trainings[run], marks[run] = read_training(run), now
            height = out.height // len(runs)
            parts = [shown(training, _names(training, metric), quiet, height) for training in trainings.values()]
            live.update(Group(*parts), refresh=True)
            time.sleep(EVERY)


def shown(
    training: "TrainingRun", names: list[str], quiet: bool = False, height: int | None = None
) -> "RenderableType":
    """The heading, loss, layers and alarms of a run, in no more than `height` lines if that is possible."""
    from rich.console import Group
    from rich.text import Text

    room = LAYERS
    if height is not None and names:
        taken = 6 + len(training.scalars) + 4 * min(ALARMS, len(training.alarms)) + 3 * len(training.forecast)
        room = max(3, min(LAYERS, (height - taken) // (len(names) + bool(len(training.paths))) - 3))
    parts: list[RenderableType] = [_scalars(training)] if training.scalars else []
    parts += [_layers(training.grid(name), room) for name in names]
    if len(training.paths):
        parts.append(_paths(training, room))
    if training.forecast:
        parts.append(Text(f"Forecast: {' '.join(training.forecast)}"))
    if training.broken:
        words = "reading was no number" if training.broken == 1 else "readings were no numbers"
        parts.append(Text(f"{training.broken} {words}: something overflowed."))
    parts += map(Text, training.notes)
    if len(training.alarms):
        parts.append(_alarms(training))
    elif training.steps and not quiet:
        parts.append(Text("No alarms."))
    return Group(Text(heading(training)), *(line for part in parts for line in ("", part)))


def heading(training: "TrainingRun") -> str:
    """One line: which model it is, how far it has come, and since when."""
    parts = [training.name, "no measurement yet"]
    if count := len(training.steps):
        parts[1:] = [f"step {training.steps[-1]:,}", f"{count:,} measurement{'s' * (count != 1)}"]
    if training.manifest.created:
        parts.append(f"since {training.manifest.created[:16].replace('T', ' ')} UTC")
    return " · ".join(parts)


def described(training: "TrainingRun", names: list[str]) -> dict[str, Any]:
    """All that is shown of a run, as a dictionary for --json."""
    from rankscope.trainings import NAMES

    grids = {name: training.grid(name) for name in names}
    return {
        "manifest": training.manifest.to_dict(),
        "model": training.name,
        "step": training.steps[-1] if training.steps else None,
        "steps": training.steps,
        "metrics": [{"name": name, "says": NAMES.get(name, name)} for name in training.metrics],
        "scalars": {
            name: [{"step": step, "value": value} for step, value in zip(*training.scalar(name), strict=True)]
            for name in training.scalars
        },
        "layers": {
            name: [
                {"layer": layer, "steps": grid.steps, "values": row.tolist(), "below_floor": noise.tolist()}
                for layer, row, noise in zip(grid.layers, grid.value, grid.noise, strict=True)
            ]
            for name, grid in grids.items()
        },
        "paths": {
            name: training.paths.filter(of=name).sort("step").select("step", "value").to_dicts()
            for name in training.lengths
        },
        "certificates": training.certificates.to_dicts(),
        "alarms": training.alarms.to_dicts(),
        "forecast": training.forecast,
        "notes": training.notes,
    }


def _scalars(training: "TrainingRun") -> "RichTable":
    from rankscope.results import Table
    from rankscope.trainings import title_of

    curves = {name: training.scalar(name)[1] for name in training.scalars[:8]}
    rows = [[title_of(name)[:24], *_ends(values)] for name, values in curves.items()]
    lines = [_lines([values])[0] for values in curves.values()]
    return tabular(Table("", ["", "start", "now"], rows, curves=("steps →", lines)), curves_at=3)


def _layers(grid: "Grid", most: int) -> "RichTable":
    """A table with a line for each layer, whose sparklines share one scale."""
    from rankscope.figures import thinned
    from rankscope.results import Table
    from rankscope.trainings import NAMES

    some = thinned(range(len(grid.layers)), most)
    marked = {(row, column) for row, at in enumerate(some) for column, k in ((1, 0), (2, -1)) if grid.noise[at, k]}
    notes = [f"Mean over {grid.heads} heads."] * (grid.heads > 1)
    notes += [f"{len(some)} of {len(grid.layers)} layers."] * (len(some) < len(grid.layers))
    notes += ["○ at its floor: rounding noise."] * bool(marked)
    values = [grid.value[row].tolist() for row in some]
    rows = [[str(grid.layers[row]), *_ends(curve)] for row, curve in zip(some, values, strict=True)]
    headings, title = ["layer", "start", "now"], NAMES.get(grid.metric, grid.metric)
    return tabular(
        Table(title, headings, rows, marked, " ".join(notes), curves=("steps →", _lines(values))), curves_at=3
    )


def _paths(training: "TrainingRun", most: int) -> "RichTable":
    """A table with a line for each length of paths."""
    from rankscope.figures import thinned
    from rankscope.results import Table

    names = thinned(training.lengths, most)
    note = f"{len(names)} of {len(training.lengths)} lengths." if len(names) < len(training.lengths) else ""
    curves = [training.paths.filter(of=name).sort("step")["value"].fill_null(float("nan")).to_list() for name in names]
    ends = [[f"{curve[k]:z.1%}" if isfinite(curve[k]) else "no number" for k in (0, -1)] for curve in curves]
    rows = [[name, *cells] for name, cells in zip(names, ends, strict=True)]
    title, lines = "path shares: what paths of each length carry of the output", _lines(curves, log=False)
    return tabular(Table(title, ["", "start", "now"], rows, note=note, curves=("steps →", lines)), curves_at=3)


def _ends(values: list[float]) -> tuple[str, str]:
    """The first finite number and the last number, as texts."""
    first = next((f"{value:.3g}" for value in values if isfinite(value)), "–")
    return first, f"{values[-1]:.3g}" if isfinite(values[-1]) else "no number"


def _lines(curves: list[list[float]], log: bool = True) -> list[str]:
    """Sparklines on one scale; with `log`, a logarithmic one if the values span more than two decades."""
    import numpy as np

    from rankscope.figures import sparkline, thinned
    from rankscope.trainings import decades

    values = np.array([thinned(curve, WIDTH) for curve in curves], dtype=float)
    if log and decades(values) > 2:
        with np.errstate(divide="ignore"):
            values = np.log10(values)
    finite = values[np.isfinite(values)]
    limits = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
    values[values == -np.inf] = limits[0]
    return [sparkline(row.tolist(), limits) for row in values]


def _alarms(training: "TrainingRun") -> "RichTable":
    """A table of the first alarm, from which others often follow, and of the last, as sentences."""
    from rankscope.results import Table

    raised = training.alarms.to_dicts()
    few = f": the first and the last {ALARMS - 1}" if len(raised) > ALARMS else ""
    shown = raised if len(raised) <= ALARMS else [raised[0], *raised[1 - ALARMS :]]
    rows = [[f"{row['step']:,}", " ".join(str(row["sentence"]).split())] for row in shown]
    return tabular(Table(f"{counted(len(raised), 'alarm')}{few}", ["step", ""], rows, wordy=True))


def spikes(
    sources: Annotated[list[Path], opt.argument("RUN", "Run folders, TensorBoard's folders, or tables by step.")],
    loss: Annotated[
        str | None, opt.option(opt.RESULT, "NAME", "What the loss is called there.", show_default="the usual names")
    ] = None,
    window: Annotated[
        int | None, opt.option(opt.RESULT, "N", "Values of the rolling mean.", min=20, show_default="1000, or a tenth")
    ] = None,
    deviations: Annotated[float, opt.option(opt.RESULT, "X", "Standard deviations that make a spike.")] = 7.0,
    results: opt.ResultOptions = opt.ResultOptions(),
) -> None:
    """Find the loss spikes of a training, and say which signals left their usual range before each.

    RUN is what a [bold]Monitor[/bold] wrote, a folder of TensorBoard, or a table by step (CSV, Parquet, JSON lines),
    as W&B exports it. How often a signal does the same when nothing follows is its chance.
    """
    from rankscope.errors import FileError, require
    from rankscope.files import atomic, writable_folder
    from rankscope.runs import begun
    from rankscope.runs import read as read_run
    from rankscope.trainings import TRAINING_TABLE, order_of_events, read_signals, split_loss

    opt.require_positive(deviations=deviations)
    folder, names = results.output, ("spikes.csv", "events.csv")
    written = (*names, "spikes.parquet", "spike_events.parquet")
    for path in () if folder is None else (folder / name for name in written):
        sentence = f"{path} is read here and would be written over: give -o another folder"
        read = {source.resolve() for source in sources}
        require(path.resolve() not in read, sentence, FileError, str(path))
    of_loss, signals = split_loss(read_signals(sources), loss)
    report = order_of_events(of_loss, signals, window=window, deviations=deviations)
    if folder is not None:
        writable_folder(folder)
        if TRAINING_TABLE not in read_run(folder).names:  # a training stays one, and may go on: it gets the CSV alone
            replace(report, manifest=begun("cpu").adding(command=command_line())).save(folder)
        for name, rows in zip(names, report.tables.values(), strict=True):
            with atomic(folder / name) as temporary:
                rows.write_csv(temporary)
    if results.as_json:
        told = {"score": report.score, "spikes": [spike._asdict() for spike in report.spikes]}
        return machine({**told, "events": report.events.to_dicts(), "sentences": report.sentences})
    say(*report.sentences)
    for shown in (table for section in report.sections() for table in section.tables):
        say("")
        show_tables(shown)
    if folder is not None:
        say_where("Spikes and events", folder)

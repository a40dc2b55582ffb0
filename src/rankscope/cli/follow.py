"""`rankscope follow`: a training run in the terminal, or on a page, while it trains."""

import sys
import time
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankscope.cli import options as opt

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from rankscope.runs.training import Grid, TrainingRun

EVERY = 1.0
"""Seconds between two readings of the folder."""
WIDTH, LAYERS, ALARMS = 32, 33, 6
"""Characters of a sparkline, layers of a table and alarms that are shown, at most."""


def follow(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder that a Monitor writes.")],
    metric: Annotated[
        str | None,
        opt.option(opt.RESULT, "NAMES", "Comma-separated: what is shown by layer.", show_default="the first"),
    ] = None,
    once: Annotated[bool, opt.option(opt.RESULT, " ", "Print it once, and end.", (), "--once")] = False,
    page: Annotated[bool, opt.option(opt.RESULT, " ", "On a local page that keeps up.", (), "--page")] = False,
    port: opt.Port = 0,
    no_open: opt.NoOpen = False,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Follow a training run while it trains: its layers from first to last measurement, loss, alarms.

    It reads what a [bold]Monitor[/bold] or [bold]rankscope checkpoints[/bold] writes, and disturbs neither.
    Ctrl-C ends it.
    """
    from rankscope.runs.training import read_training

    training = read_training(run)
    names = _names(training, metric)
    if page:
        _page(run, names[0] if names else None, port, no_open, as_json, quiet)
        return
    if as_json:
        from rankscope.cli.show import machine

        machine(described(training, names))
        return
    from rankscope.cli.show import console

    out = console()
    if once or not (out.is_terminal and sys.stdout.isatty()):
        out.print(shown(training, names, quiet))
        return
    _live(run, metric, quiet)


def _names(training: "TrainingRun", metrics: str | None) -> list[str]:
    from rankscope.cli.inputs import split_names

    if metrics is not None:
        return [training.metric(name) for name in split_names("metric", metrics)]
    return training.metrics[:1]


def _live(run: Path, metric: str | None, quiet: bool) -> None:
    """Show the run in the terminal, and again whenever it has grown, until Ctrl-C."""
    from rich.live import Live

    from rankscope.cli.show import console
    from rankscope.runs.training import read_training, stamp

    out, mark = console(), ""
    training = read_training(run)
    try:
        with Live(console=out, auto_refresh=False) as live:
            while True:
                if (now := stamp(run)) != mark:
                    training, mark = read_training(run), now
                live.update(shown(training, _names(training, metric), quiet, out.height), refresh=True)
                time.sleep(EVERY)
    except KeyboardInterrupt:
        return


def _page(run: Path, metric: str | None, port: int, no_open: bool, as_json: bool, quiet: bool) -> None:
    from rankscope.cli.explore import require_server
    from rankscope.cli.show import console, machine

    require_server("a page")
    from rankscope.explorer.follow import app
    from rankscope.explorer.server import bind_port, serve_forever

    socket = bind_port(port)
    bound_port = socket.getsockname()[1]
    address = f"http://127.0.0.1:{bound_port}/"
    if as_json:
        machine({"address": address, "run": str(run)})
    else:
        console().print(address if quiet else f"Following: {address} (Ctrl-C ends it)", soft_wrap=True)
    sys.stdout.flush()
    serve_forever(app(run, bound_port, metric), socket, None if no_open else address)


def shown(
    training: "TrainingRun", names: list[str], quiet: bool = False, height: int | None = None
) -> "RenderableType":
    """The heading, loss, layers and alarms of a run, in no more than `height` lines if that is possible."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(heading(training))]
    if training.scalars:
        parts += ["", _scalars(training)]
    alarms = _alarms(training)
    room = LAYERS
    if height is not None and names:
        taken = 6 + len(training.scalars) + 4 * len(training.alarms[-ALARMS:])
        room = max(3, min(LAYERS, (height - taken) // (len(names) + bool(len(training.paths))) - 3))
    for name in names:
        parts += ["", _layers(training.grid(name), room)]
    if len(training.paths):
        parts += ["", _paths(training, room)]
    if training.broken:
        words = "reading was no number" if training.broken == 1 else "readings were no numbers"
        parts += ["", Text(f"{training.broken} {words}: something overflowed.")]
    if alarms is not None:
        parts += ["", alarms]
    elif training.steps and not quiet:
        parts += ["", Text("No alarms.")]
    return Group(*parts)


def heading(training: "TrainingRun") -> str:
    """One line: which model it is, how far it has come, and since when."""
    parts = [training.name]
    if training.steps:
        count = len(training.steps)
        parts += [f"step {training.steps[-1]:,}", f"{count:,} measurement{'s' * (count != 1)}"]
    else:
        parts.append("no measurement yet")
    if training.manifest.created:
        parts.append(f"since {training.manifest.created[:16].replace('T', ' ')} UTC")
    return " · ".join(parts)


def described(training: "TrainingRun", names: list[str]) -> dict[str, Any]:
    """All that is shown of a run, as a dictionary for --json."""
    from rankscope.runs.training import NAMES

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
                {"layer": layer, "steps": grid.steps, "values": row.tolist()}
                for layer, row in zip(grid.layers, grid.value, strict=True)
            ]
            for name, grid in grids.items()
        },
        "paths": {
            name: training.paths.filter(of=name).sort("step").select("step", "value").to_dicts()
            for name in training.lengths
        },
        "certificates": training.certificates.to_dicts(),
        "alarms": training.alarms.to_dicts(),
    }


def _curves_table(title: str, first: str, note: str = "") -> "Table":
    """An empty table whose rows are curves: a name, the first number, the last one, a sparkline."""
    from rankscope.cli.show import titled

    table = titled(title, note)
    table.title = table.title if title else None
    table.add_column(first, justify="right" if first else "left", no_wrap=True)
    for column in ("start", "now"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("steps →", no_wrap=True)
    return table


def _scalars(training: "TrainingRun") -> "Table":
    from rankscope.runs.training import title_of

    table = _curves_table("", "")
    for name in training.scalars[:8]:
        _, values = training.scalar(name)
        table.add_row(title_of(name)[:24], *_ends(values), _lines([values])[0])
    return table


def _layers(grid: "Grid", most: int) -> "Table":
    """A table with a line for each layer, whose sparklines share one scale."""
    from rankscope.cli.show import thinned
    from rankscope.runs.training import NAMES

    rows = list(thinned(list(range(len(grid.layers))), most))
    noise = bool(grid.noise[rows, -1].any()) if grid.steps else False
    notes = [f"Mean over {grid.heads} heads."] * (grid.heads > 1)
    notes += [f"{len(rows)} of {len(grid.layers)} layers."] * (len(rows) < len(grid.layers))
    notes += ["○ at its floor: rounding noise."] * noise
    table = _curves_table(NAMES.get(grid.metric, grid.metric), "layer", " ".join(notes))
    values = [grid.value[row].tolist() for row in rows]
    for row, curve, line in zip(rows, values, _lines(values), strict=True):
        start, now = _ends(curve)
        mark = " ○" if grid.noise[row, -1] else "  " if noise else ""
        table.add_row(str(grid.layers[row]), start, now + mark, line)
    return table


def _paths(training: "TrainingRun", most: int) -> "Table":
    """A table with a line for each length of paths."""
    from rankscope.cli.show import thinned

    names = list(thinned(training.lengths, most))
    note = f"{len(names)} of {len(training.lengths)} lengths." if len(names) < len(training.lengths) else ""
    table = _curves_table("path shares: what paths of each length carry of the output", "", note)
    curves = [training.paths.filter(of=name).sort("step")["value"].fill_null(float("nan")).to_list() for name in names]
    for name, curve, line in zip(names, curves, _lines(curves, log=False), strict=True):
        start, now = (f"{curve[k]:z.1%}" if isfinite(curve[k]) else "no number" for k in (0, -1))
        table.add_row(name, start, now, line)
    return table


def _ends(values: list[float]) -> tuple[str, str]:
    """The first finite number and the last number, as texts."""
    first = next((f"{value:.3g}" for value in values if isfinite(value)), "–")
    return first, f"{values[-1]:.3g}" if isfinite(values[-1]) else "no number"


def _lines(curves: list[list[float]], log: bool = True) -> list[str]:
    """Sparklines on one scale; with `log`, a logarithmic one if the values span more than two decades."""
    import numpy as np

    from rankscope.cli.show import sparkline, thinned
    from rankscope.runs.training import decades

    values = np.array([thinned(curve, WIDTH) for curve in curves], dtype=float)
    if log and decades(values) > 2:
        with np.errstate(divide="ignore"):
            values = np.log10(values)
    finite = values[np.isfinite(values)]
    limits = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
    values[values == -np.inf] = limits[0]
    return [sparkline(row.tolist(), limits) for row in values]


def _alarms(training: "TrainingRun") -> "Table | None":
    """A table of the last alarms, as sentences; None if there are none."""
    from rich.text import Text

    from rankscope.cli.show import titled

    rows = training.alarms.to_dicts()
    if not rows:
        return None
    count = len(rows)
    before = f", the last {ALARMS} of them" if count > ALARMS else ""
    table = titled(f"{count} alarm{'s' * (count != 1)}{before}")
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for row in rows[-ALARMS:]:
        table.add_row(f"{row['step']:,}", Text(" ".join(str(row["sentence"]).split())))
    return table

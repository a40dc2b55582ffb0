"""`rankscope compare` of training runs: the same metric at the same steps, and where they part."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rankscope.cli.options import PrintOptions
from rankscope.errors import FileError, MetricError

if TYPE_CHECKING:
    from rankscope.runs.training import TrainingRun

APART = 0.1
"""Runs have diverged where their values differ by more than this share of the larger."""
MOST_LAYERS = 33
"""Layers of the table, at most."""


class RunsLine(NamedTuple):
    """A line of the comparison: one layer, or the loss, of all runs."""

    name: str
    values: list[float]
    """The value of each run at the last step that all have."""
    parted: int | None
    """The step from which on the runs differ to the end; None if they do not."""


class RunComparison(NamedTuple):
    """One metric of several training runs at the steps that all have."""

    metric: str
    steps: list[int]
    lines: list[RunsLine]
    notes: list[str]


def is_training(thing: str) -> bool:
    """True for a folder that holds a training run and no profile."""
    from rankscope.runs import read
    from rankscope.runs.training import TRAINING_TABLE

    folder = Path(thing)
    return folder.is_dir() and not (folder / "profile.parquet").is_file() and TRAINING_TABLE in read(folder).names


def compare_trainings(things: list[str], metrics: str | None, output: Path | None, printing: PrintOptions) -> None:
    """Print training runs side by side; folders that are no training runs, and `-o`, are refused."""
    from rankscope.cli.inputs import split_names
    from rankscope.cli.show import console, machine, say
    from rankscope.runs.training import read_training

    others = [thing for thing in things if not is_training(thing)]
    if others:
        raise FileError(
            f"a training run must be compared with training runs; {others[0]} is none: leave it out, or "
            "measure its checkpoints with rankscope checkpoints",
            subject=others[0],
        )
    if len(things) < 2:
        raise MetricError(
            "compare must be given at least two training runs; got one: follow shows one", subject="things"
        )
    if output is not None:
        raise FileError(
            "-o must go with what compare measures; training runs are measured already: rankscope report "
            f"{' '.join(things)} -o PAGE makes a page of them",
            subject="output",
        )
    runs = [read_training(thing) for thing in things]
    metric = None if metrics is None else split_names("metrics", metrics)[0]
    comparison = compare_runs(runs, things, metric)
    sentence, differ = verdict(comparison), _metric_disagreement(runs, things, comparison)
    if printing.as_json:
        lines = [
            {"of": line.name, "values": dict(zip(things, line.values, strict=True)), "parted_at": line.parted}
            for line in comparison.lines
        ]
        more = {"verdict": sentence, "notes": comparison.notes, "disagreement": differ or None}
        machine({"metric": comparison.metric, "steps": comparison.steps, "lines": lines, **more})
        return
    console().print(_table(comparison, things))
    say("", sentence, *([differ] if differ else []), *([] if printing.quiet else comparison.notes))


def compare_runs(runs: "list[TrainingRun]", things: list[str], metric: str | None) -> RunComparison:
    """Compare a metric, or the first that all runs have, at the steps and layers that all have."""
    shared = [name for name in runs[0].metrics if all(name in run.metrics for run in runs)]
    if not shared or metric not in (None, *shared):
        have = "; ".join(f"{thing} has {', '.join(run.metrics)}" for thing, run in zip(things, runs, strict=True))
        must = f"all have {metric}" if metric else "have a metric in common"
        raise MetricError(f"training runs to compare must {must}; {have}", subject="metrics")
    metric = metric or shared[0]
    grids = [run.grid(metric) for run in runs]
    steps = sorted(set.intersection(*(set(grid.steps) for grid in grids)))
    if not steps:
        have = " and ".join(f"{grid.steps[0]}..{grid.steps[-1]}" for grid in grids)
        raise MetricError(
            f"training runs to compare must have been measured at the same steps; these have none in common "
            f"({have}): monitor them with the same every",
            subject="steps",
        )
    layers = sorted(set.intersection(*(set(grid.layers) for grid in grids)))
    notes = []
    deep = [grid.layers[-1] for grid in grids]
    if len(set(deep)) > 1:
        notes.append(f"Their depths differ ({', '.join(map(str, deep))} layers): the layers all have.")
    ends = [run.steps[-1] for run in runs]
    if len(set(ends)) > 1:
        notes.append(f"They end at steps {', '.join(f'{end:,}' for end in ends)}: the steps all have.")
    lines = []
    if all("loss" in run.scalars for run in runs):
        losses = [dict(zip(*run.scalar("loss"), strict=True)) for run in runs]
        logged = [step for step in steps if all(step in loss for loss in losses)]
        if logged:
            lines.append(_line("loss", [[loss[step] for step in logged] for loss in losses], logged))
    for layer in layers:
        rows, noise = [], []
        for grid in grids:
            row, at = grid.layers.index(layer), [grid.steps.index(step) for step in steps]
            rows.append(grid.value[row, at])
            noise.append(grid.noise[row, at])
        lines.append(_line(f"layer {layer}", rows, steps, noise))
    return RunComparison(metric, steps, lines, notes)


def _metric_disagreement(runs: "list[TrainingRun]", things: list[str], comparison: RunComparison) -> str:
    """A sentence on two metrics that rank the runs differently at the last step and layer that all have."""
    from rankscope.profiles.verdict import disagreement

    metrics = [comparison.metric, *(name for name in runs[0].metrics if name != comparison.metric)]
    shared = [name for name in metrics if all(name in run.metrics for run in runs)]
    layer = min(run.grid(comparison.metric).layers[-1] for run in runs)
    names = [_short(thing, things) for thing in things]
    ends = {
        metric: {
            name: logs[comparison.steps[-1]]
            for name, run in zip(names, runs, strict=True)
            if comparison.steps[-1] in (logs := run.grid(metric).logs(layer))
        }
        for metric in shared
    }
    return disagreement(ends)


def verdict(comparison: RunComparison) -> str:
    """A sentence that says from which layer and step on the runs diverge."""
    layers = [line for line in comparison.lines if line.name != "loss"]
    parted = [line for line in layers if line.parted is not None]
    loss = next((line for line in comparison.lines if line.name == "loss"), None)
    of = ""
    if loss is not None:
        how = "ends together" if loss.parted is None else f"parts from step {loss.parted:,} on"
        of = f" The loss {how}."
    if not parted:
        return (
            f"In {comparison.metric} they are within {APART:.0%} of each other at the end, step "
            f"{comparison.steps[-1]:,}, at every layer.{of}"
        )
    first = min(line.parted for line in parted if line.parted is not None)
    where = [line.name.removeprefix("layer ") for line in parted if line.parted == first]
    named = f"layer {where[0]}" if len(where) == 1 else f"layers {', '.join(where)}"
    return (
        f"In {comparison.metric} they part first at {named}, from step {first:,} on; in {len(parted)} of "
        f"{len(layers)} layers to the end.{of}"
    )


def _line(name: str, rows: "list[Any]", steps: list[int], noise: "list[Any] | None" = None) -> RunsLine:
    """The line of values `[run, step]`; runs that are all below their floors (`noise`) do not differ."""
    import numpy as np

    values = np.array(rows, dtype=float)
    low, high = values.min(0), values.max(0)
    size = np.maximum(np.abs(low), np.abs(high))
    apart = ~(high - low <= APART * size)  # what is no number in one of them differs
    apart &= ~np.isnan(values).all(0)
    if noise is not None:
        apart &= ~np.array(noise).all(0)
    together = np.flatnonzero(~apart)
    first = int(together[-1]) + 1 if len(together) else 0
    return RunsLine(name, values[:, -1].tolist(), steps[first] if first < len(steps) else None)


def _table(comparison: RunComparison, things: list[str]) -> Any:
    from math import isfinite

    from rich.markup import escape

    from rankscope.cli.show import thinned, titled

    title = f"{comparison.metric} at step {comparison.steps[-1]:,}, the last that all have"
    table = titled(title, f"parted: from that step on more than {APART:.0%} apart, to the end")
    table.add_column("", no_wrap=True)
    for thing in things:
        table.add_column(escape(_short(thing, things)), justify="right", overflow="fold")
    if len(things) == 2:
        table.add_column("ratio", justify="right", no_wrap=True)
    table.add_column("parted", justify="right", no_wrap=True)
    for line in thinned(comparison.lines, MOST_LAYERS + 1):
        cells = [f"{value:.3g}" if isfinite(value) else "no number" for value in line.values]
        if len(things) == 2:
            a, b = line.values
            cells.append(f"{b / a:.3g}" if a and isfinite(b / a) else "–")
        parted = "no" if line.parted is None else f"from {line.parted:,}"
        table.add_row(line.name, *cells, parted)
    return table


def _short(thing: str, things: list[str]) -> str:
    names = [Path(path).resolve().name for path in things]
    name = Path(thing).resolve().name
    return name if names.count(name) == 1 else thing

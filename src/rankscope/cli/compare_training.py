"""`rankscope compare` of training runs: the same metric at the same steps, and where they part."""

from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rankscope.cli.inputs import split_names
from rankscope.cli.options import ResultOptions
from rankscope.cli.show import console, machine, say, thinned, titled
from rankscope.errors import FileError, MetricError

if TYPE_CHECKING:
    from rich.table import Table

    from rankscope.trainings import TrainingRun

APART = 0.1  # Runs have diverged where their values differ by more than this share of the larger
MOST_LAYERS = 33  # Layers of the table, at most


class RunsLine(NamedTuple):
    """A line of the comparison: one layer, or the loss, of all runs."""

    name: str
    values: list[float]  # The value of each run at the last step that all have
    parted: int | None  # The step from which on the runs differ to the end; None if they do not
    noise: list[bool]  # True for each run whose value lies at its floor


class RunComparison(NamedTuple):
    """One metric of several training runs at the steps that all have."""

    metric: str
    steps: list[int]
    lines: list[RunsLine]
    notes: list[str]


def is_training(thing: str) -> bool:
    """True for a folder that holds a training run and no profile."""
    from rankscope.runs import read
    from rankscope.trainings.training import TRAINING_TABLE

    folder = Path(thing)
    return folder.is_dir() and not (folder / "profile.parquet").is_file() and TRAINING_TABLE in read(folder).names


def compare_trainings(things: list[str], metrics: str | None, results: ResultOptions) -> None:
    """Print training runs side by side; folders that are no training runs, and `-o`, are refused."""
    from rankscope.trainings import read_training

    for thing in things:
        if not is_training(thing):
            raise FileError(
                f"training runs are compared with training runs; {thing} is none: leave it out", subject=thing
            )
    if len(things) < 2:
        raise MetricError("compare must be given at least two training runs; got one", subject="things")
    if results.output is not None:
        raise FileError(
            f"-o goes with what compare measures; use rankscope report {' '.join(things)} -o PAGE", subject="output"
        )
    runs = [read_training(thing) for thing in things]
    comparison = compare_runs(runs, things, None if metrics is None else split_names("metrics", metrics)[0])
    names = unique_titles([Path(thing).resolve().name for thing in things], things)
    sentence, differ = verdict(comparison), _metric_disagreement(dict(zip(names, runs, strict=True)), comparison)
    if results.as_json:
        lines = [
            {
                "of": line.name,
                "values": dict(zip(things, line.values, strict=True)),
                "below_floor": dict(zip(things, line.noise, strict=True)),
                "parted_at": line.parted,
            }
            for line in comparison.lines
        ]
        more = {"verdict": sentence, "notes": comparison.notes, "disagreement": differ or None}
        return machine({"metric": comparison.metric, "steps": comparison.steps, "lines": lines, **more})
    console().print(_table(comparison, names))
    say("", sentence, *([differ] if differ else []), *([] if results.quiet else comparison.notes))


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
            f"training runs to compare must share measured steps; {have} have none in common", subject="steps"
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


def _metric_disagreement(runs: "dict[str, TrainingRun]", comparison: RunComparison) -> str:
    """A sentence on two metrics that rank the runs differently at the last step and layer that all have."""
    from rankscope.profiles.verdict import disagreement

    names = [name for run in runs.values() for name in run.metrics]
    shared = [name for name in dict.fromkeys([comparison.metric, *names]) if names.count(name) == len(runs)]
    layer = min(run.grid(comparison.metric).layers[-1] for run in runs.values())
    ends = {
        metric: {
            name: logs[comparison.steps[-1]]
            for name, run in runs.items()
            if comparison.steps[-1] in (logs := run.grid(metric).logs(layer))
        }
        for metric in shared
    }
    return disagreement(ends)


def verdict(comparison: RunComparison) -> str:
    """A sentence that says from which layer and step on the runs diverge."""
    loss = [line.parted for line in comparison.lines if line.name == "loss"]
    how = [f" The loss {'ends together' if step is None else f'parts from step {step:,} on'}." for step in loss]
    layers = {line.name.removeprefix("layer "): line.parted for line in comparison.lines if line.name != "loss"}
    parted = {layer: step for layer, step in layers.items() if step is not None}
    if not parted:
        return (
            f"In {comparison.metric} they are within {APART:.0%} of each other at the end, step "
            f"{comparison.steps[-1]:,}, at every layer.{''.join(how)}"
        )
    first = min(parted.values())
    where = [layer for layer, step in parted.items() if step == first]
    return (
        f"In {comparison.metric} they part first at layer{'s' * (len(where) > 1)} {', '.join(where)}, from step "
        f"{first:,} on; in {len(parted)} of {len(layers)} layers to the end.{''.join(how)}"
    )


def _line(name: str, rows: "list[Any]", steps: list[int], noise: "list[Any] | None" = None) -> RunsLine:
    """The line of values `[run, step]`; runs that are all below their floors (`noise`) do not differ."""
    import numpy as np

    values = np.array(rows, dtype=float)
    low, high = values.min(0), values.max(0)
    size = np.maximum(np.abs(low), np.abs(high))
    apart = ~(high - low <= APART * size)  # what is no number in one of them differs
    apart &= ~np.isnan(values).all(0)
    floors = np.zeros(values.shape, bool) if noise is None else np.array(noise)
    apart &= ~floors.all(0)
    together = np.flatnonzero(~apart)
    first = int(together[-1]) + 1 if len(together) else 0
    return RunsLine(name, values[:, -1].tolist(), steps[first] if first < len(steps) else None, floors[:, -1].tolist())


def _table(comparison: RunComparison, names: list[str]) -> "Table":
    title = f"{comparison.metric} at step {comparison.steps[-1]:,}, the last that all have"
    noise = "\n○ at its floor: rounding noise" if any(any(line.noise) for line in comparison.lines) else ""
    table = titled(title, f"parted: from that step on more than {APART:.0%} apart, to the end{noise}")
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    for heading in ("ratio", "parted") if len(names) == 2 else ("parted",):
        table.add_column(heading, justify="right", no_wrap=True)
    for line in thinned(comparison.lines, MOST_LAYERS + 1):
        cells = [f"{value:.3g}" if isfinite(value) else "no number" for value in line.values]
        cells = [f"{cell} ○" if noise else cell for cell, noise in zip(cells, line.noise, strict=True)]
        if len(names) == 2:
            a, b = line.values
            cells.append(f"{b / a:.3g}" if a and isfinite(b / a) and not any(line.noise) else "–")
        table.add_row(line.name, *cells, "no" if line.parted is None else f"from {line.parted:,}")
    return table


def unique_titles(titles: list[str], things: list[str]) -> list[str]:
    """The titles; where two are equal, the arguments themselves."""
    return [title if titles.count(title) == 1 else thing for title, thing in zip(titles, things, strict=True)]

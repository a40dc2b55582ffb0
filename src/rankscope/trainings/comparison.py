"""`RunComparison`: one metric of several training runs at the steps that all have, and where the runs part."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, ClassVar, NamedTuple

import numpy as np
import polars as pl

from rankscope.errors import MetricError
from rankscope.extras import counted
from rankscope.figures import Chart
from rankscope.results import Plot, Result, Section, Table
from rankscope.runs import Manifest
from rankscope.trainings.figures import side_by_side
from rankscope.trainings.run import TrainingRun

APART = 0.1  # Runs have diverged where their values differ by more than this share of the larger
COMPARED: dict[str, Any] = {
    "of": pl.String, "run": pl.String, "value": pl.Float64, "below_floor": pl.Boolean, "parted_at": pl.Int64,
}  # fmt: skip


class RunsLine(NamedTuple):
    """A line of the comparison: one layer, or the loss, of all runs."""

    name: str
    values: list[float]  # The value of each run at the last step that all have
    parted: int | None  # The step from which on the runs differ to the end; None if they do not
    noise: list[bool]  # True for each run whose value lies at its floor


@dataclass(frozen=True, eq=False, repr=False)
class RunComparison(Result):
    """One metric of several training runs at the steps that all have."""

    kind = "comparison"
    schemas: ClassVar = {"comparison": COMPARED}
    metric: str  # The metric
    names: tuple[str, ...]  # The runs, as they were named
    steps: list[int]  # The steps that all have
    lines: list[RunsLine]  # The loss, if all have it, and each layer that all have
    manifest: Manifest = field(default_factory=Manifest)  # That of the first run
    notes: tuple[str, ...] = ()  # In what the runs differ otherwise
    chart: Chart | None = None
    """Their losses and the metric at the last layer, side by side; None where it was read from a folder."""

    @property
    def tables(self) -> Mapping[str, pl.DataFrame]:
        """A row for each line and run: its value at the last step that all have, and from when on the runs differ."""
        rows = [
            (line.name, name, value, noise, line.parted)
            for line in self.lines
            for name, value, noise in zip(self.names, line.values, line.noise, strict=True)
        ]
        return {"comparison": pl.DataFrame(rows, schema=COMPARED, orient="row")}

    def details(self) -> dict[str, Any]:
        """The metric, the runs and the steps."""
        return {"metric": self.metric, "names": list(self.names), "steps": self.steps}

    @classmethod
    def made_of(
        cls, tables: Mapping[str, pl.DataFrame], manifest: Manifest, details: Mapping[str, Any]
    ) -> "RunComparison":
        """The comparison of this table."""
        lines = [
            RunsLine(str(name), part["value"].to_list(), part["parted_at"][0], part["below_floor"].to_list())
            for (name,), part in tables["comparison"].group_by("of", maintain_order=True)
        ]
        notes = tuple(details.get("notes", ()))
        return cls(details["metric"], tuple(details["names"]), list(details["steps"]), lines, manifest, notes)

    @property
    def title(self) -> str:
        """The metric that is compared, of how many trainings, and how far."""
        return f"RunComparison: {self.metric} of {counted(len(self.names), 'training')}, to step {self.steps[-1]:,}"

    @property
    def verdict(self) -> str:
        """A sentence that says from which layer and step on the runs diverge."""
        loss = [line.parted for line in self.lines if line.name == "loss"]
        how = [f" The loss {'ends together' if step is None else f'parts from step {step:,} on'}." for step in loss]
        layers = {line.name.removeprefix("layer "): line.parted for line in self.lines if line.name != "loss"}
        parted = {layer: step for layer, step in layers.items() if step is not None}
        if not parted:
            return (
                f"In {self.metric} they are within {APART:.0%} of each other at the end, step "
                f"{self.steps[-1]:,}, at every layer.{''.join(how)}"
            )
        first = min(parted.values())
        where = [layer for layer, step in parted.items() if step == first]
        return (
            f"In {self.metric} they part first at layer{'s' * (len(where) > 1)} {', '.join(where)}, from step "
            f"{first:,} on; in {len(parted)} of {len(layers)} layers to the end.{''.join(how)}"
        )

    def sections(self) -> list[Section]:
        """Where the runs part, with their last values."""
        rows = [
            [line.name, *(f"{value:.3g}" if isfinite(value) else "no number" for value in line.values),
             *([_ratio(line)] if len(self.names) == 2 else []),
             "no" if line.parted is None else f"from {line.parted:,}"]
            for line in self.lines
        ]  # fmt: skip
        marked = {(row, k + 1) for row, line in enumerate(self.lines) for k, noise in enumerate(line.noise) if noise}
        title = f"{self.metric} at step {self.steps[-1]:,}, the last that all have"
        note = f"parted: from that step on more than {APART:.0%} apart, to the end"
        note += "\n○ at its floor: rounding noise" if marked else ""
        headings = ["", *self.names, *(["ratio"] if len(self.names) == 2 else []), "parted"]
        table = Table(title, headings, rows, marked, note)
        plots = [] if self.chart is None else [Plot("trainings", [("", self.chart)])]
        return [Section("Where the trainings part", self.verdict, plots, [table])]


def _ratio(line: RunsLine) -> str:
    """How many times the value of the first of two runs that of the second is; a dash where one is noise."""
    first, second = line.values
    return f"{second / first:.3g}" if first and isfinite(second / first) and not any(line.noise) else "–"


def compare_runs(runs: Sequence[TrainingRun], things: Sequence[str], metric: str | None = None) -> RunComparison:
    """Compare a metric, or the first that all runs have, at the steps and layers that all have.

    Args:
        runs: The training runs.
        things: Their names.
        metric: The metric.

    Raises:
        MetricError: The runs have no metric, or no step, in common.
    """
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
    chart = side_by_side(dict(zip(things, runs, strict=True)), metric)
    return RunComparison(metric, tuple(things), steps, lines, runs[0].manifest, tuple(notes), chart)


def _line(name: str, rows: list[Any], steps: list[int], noise: list[Any] | None = None) -> RunsLine:
    """The line of values `[run, step]`; runs that are all below their floors (`noise`) do not differ."""
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

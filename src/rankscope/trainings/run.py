"""`TrainingRun`: a training as far as it is written, as a result; `read_training` reads one.

`RunComparison`: one metric of several training runs at the steps that all have, and where the runs part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import polars as pl

from rankscope.errors import MetricError
from rankscope.extras import counted
from rankscope.figures import Chart
from rankscope.results import Plot, Result, Section, Table, sentence
from rankscope.runs import Manifest, Run
from rankscope.trainings.figures import (
    FEW,
    LINES,
    STEPS,
    layer_curves,
    layer_map,
    path_shares,
    run_curves,
    side_by_side,
)
from rankscope.trainings.signals import run_events, run_loss
from rankscope.trainings.spikes import find_spikes
from rankscope.trainings.training import (
    ALARMS_TABLE,
    CERTIFICATES_TABLE,
    READ,
    TRAINING_TABLE,
    TrainingTables,
    read_tables,
    title_of,
)

if TYPE_CHECKING:
    from rankscope.theory import BoundView


MAPS, PANELS, ALARMS = 8, 6, 200  # Metrics that are drawn as maps, panels of a figure, and alarms of the table, at most


@dataclass(frozen=True, eq=False, repr=False)
class TrainingRun(TrainingTables, Result):
    """A training run as far as it is written; see `read_training`."""

    kind = "training"
    schemas: ClassVar = {name: schema for name, (schema, _) in READ.items()}
    optional = (ALARMS_TABLE, CERTIFICATES_TABLE)

    @property
    def tables(self) -> Mapping[str, pl.DataFrame]:
        """Measurements, alarms, and what is proved of the probe."""
        return {TRAINING_TABLE: self.table, ALARMS_TABLE: self.alarms, CERTIFICATES_TABLE: self.certificates}

    @classmethod
    def of_run(cls, run: Run, entry: str) -> "TrainingRun":
        """The training in a run folder, whose tables may be growing."""
        return read_tables(run.folder, cls)

    @classmethod
    def made_of(
        cls, tables: Mapping[str, pl.DataFrame], manifest: Manifest, details: Mapping[str, Any]
    ) -> "TrainingRun":
        """The training of these tables, which are in no folder."""
        empty = {name: pl.DataFrame(schema=cls.schemas[name]) for name in cls.optional}
        table, alarms, certificates = ({**empty, **tables}[name] for name in READ)
        return cls(Path(), manifest, table, alarms, certificates, tuple(details.get("notes", ())))

    @property
    def title(self) -> str:
        """What is trained, and how far."""
        far = f" up to step {self.steps[-1]:,}" if self.steps else ""
        return f"TrainingRun: {self.name}, {counted(len(self.steps), 'measurement')}{far}"

    @property
    def sentence(self) -> str:
        """How many alarms there were, the first of them, and how the loss went."""
        if not self.steps:
            return "Nothing was measured yet."
        alarms, last = self.alarms.height, self.steps[-1]
        sentences = [f"{counted(alarms, 'alarm') if alarms else 'No alarms'} up to step {last:,}."]
        if alarms:
            step, alarm = self.alarms["step"][0], str(self.alarms["sentence"][0])
            when = "" if alarm.startswith(f"Step {step}") else f", at step {step:,}"
            sentences.append(f"The first{when}: {alarm}")
        if "loss" in self.scalars:
            _, values = self.scalar("loss")
            first, now = (f"{value:.3g}" if isfinite(value) else "no number" for value in (values[0], values[-1]))
            sentences.append(f"The loss went from {first} to {now}.")
        loss = run_loss(self)
        if loss is not None and (spikes := find_spikes(loss)):
            when = f"{'the first ' * (len(spikes) > 1)}at step {spikes[0].first:,}"
            sentences.append(f"The loss has {counted(len(spikes), 'spike')}, {when}.")
        if self.forecast:
            sentences.append(f"Forecast: {' '.join(self.forecast)}")
        return " ".join(sentences)

    def overview(self) -> Section:
        """The sentences, and the first metric by layer and step."""
        plots = [Plot("training", [("", chart)]) for chart in (self.charts() if self.metrics else [])]
        return Section(self.title, self.sentence, plots, ends_tables(self)[:1])

    def sections(self) -> list[Section]:
        """What was measured, layer by step, and loss spikes if there are any; none if nothing was measured yet."""
        if not self.steps:
            return []
        count = len(self.steps)
        learning = self.learning
        read = [name for name in self.metrics if name not in learning]
        few = sentence("training", "few", drawn=STEPS, count=count) if count > STEPS else ""
        marks = sentence("training", "marks") if len(self.alarms) else ""
        plots = []
        if shown := (read or learning)[:MAPS]:
            noise = sentence("training", "noise") if any(self.grid(name).noise.any() for name in shown) else ""
            caption = sentence("training", "maps", heads=_heads(self, shown), noise=noise, few=few, marks=marks)
            plots.append(Plot("training", [(title_of(name), layer_map(self, name)) for name in shown], caption))
            curves = [(title_of(name), layer_curves(self, [name])) for name in shown]
            caption = sentence("training", "curves", lines=_lines(self, shown, LINES))
            plots.append(Plot("training-curves", curves, caption))
        if self.scalars:
            scalars = run_curves(self, self.scalars[:PANELS])
            plots.append(Plot("training-run", [("", scalars)], sentence("training", "scalars")))
        if learning:
            caption = sentence("training", "gradients", lines=_lines(self, learning, FEW))
            plots.append(Plot("training-gradients", [("", layer_curves(self, learning))], caption))
        if len(self.paths):
            plots.append(Plot("training-paths", [("", path_shares(self))], sentence("training", "shares")))
        first, last = self.steps[0], self.steps[-1]
        monitored = "; ".join(map(title_of, [*self.metrics, *self.scalars]))
        lead = f"{counted(count, 'measurement')} from step {first:,} to {last:,}. Monitored: {monitored}."
        notes = []
        if self.broken:
            notes.append(f"{counted(self.broken, 'reading')} of samples were no numbers: something overflowed.")
        measured = Section("The training, layer by step", lead, plots, _tables(self), notes, key="training")
        spikes = run_events(self)
        return [measured, *([] if spikes is None else spikes.sections())]

    def charts(self, metric: str | None = None, *, curves: bool = False) -> list[Chart]:
        """A metric (the first, if left out) by layer and step as a map, or as a curve for each layer."""
        name = self.metric(metric)
        return [layer_curves(self, [name]) if curves else layer_map(self, name)]


def read_training(folder: str | Path) -> TrainingRun:
    """The training run in a folder, as far as it is written; raises FileError if there is none."""
    return read_tables(folder, TrainingRun)


def _tables(training: TrainingTables) -> list[Table]:
    tables = []
    if len(training.alarms):
        rows = [[_where(row), str(row["sentence"])] for row in training.alarms.head(ALARMS).iter_rows(named=True)]
        few = f"The first {ALARMS} of {len(training.alarms)}." if len(training.alarms) > ALARMS else ""
        tables.append(Table("Alarms", ["rule and place", "what it says"], rows, wordy=True, note=few))
    return [*tables, *_proved(training), *ends_tables(training)]


def ends_tables(training: TrainingTables) -> list[Table]:
    """The first metric by layer, at the first measurement and the last; of several stacks of blocks a table each."""
    tables = []
    for metric in training.of_stacks(training.metrics[0]) if training.metrics else []:
        grid = training.grid(metric)
        ends = [(grid.steps[k], grid.value[:, k], grid.noise[:, k]) for k in dict.fromkeys((0, -1 % len(grid.steps)))]
        marked = {(row, column + 1) for row, (*_, noise) in enumerate(ends) for column in noise.nonzero()[0].tolist()}
        cells = [[f"step {step:,}", *(f"{value:.3g}" for value in values)] for step, values, _ in ends]
        title = f"{metric} by layer, at the first measurement and the last"
        note = "○ at or below the floor." if marked else ""
        tables.append(Table(title, ["layer", *map(str, grid.layers)], cells, marked, note))
    return tables


def _proved(training: TrainingTables) -> list[Table]:
    """A table of what theorems say of the probe, at the first measurement with certificates and the last."""
    steps = sorted(training.certificates["step"].unique().to_list())
    if not steps:
        return []
    from rankscope.theory import bound_views, quantity

    ends = list(dict.fromkeys((steps[0], steps[-1])))
    columns = [{view.theorem: view for view in bound_views(training.certificates.filter(step=step))} for step in ends]
    held = [name for name in columns[-1] if any(name in views and views[name].met_to for views in columns)]
    rows = []
    for name in held:
        last = columns[-1][name]
        cells = [_bound(views[name]) if name in views else "–" for views in columns]
        rows.append([name, quantity(last.quantity).symbol, *cells])
    unmet = [name for name in columns[-1] if name not in held]
    note = "Measured, and the bound; of the sample with the most slack."
    if unmet:
        note += f" Hypotheses not met: {', '.join(unmet)}."
    heads = ["theorem", "of", *(f"step {step:,}" for step in ends)]
    return [Table("What is proved of the probe", heads, rows, note=note, titled=True)]


def _bound(view: "BoundView") -> str:
    if not view.met_to:
        return "does not hold"
    bound = f"{view.measured} {view.sign} {view.bound}" if view.state == "says" else "says nothing"
    return f"{bound}, layer {view.layer}"


def _where(row: dict[str, object]) -> str:
    """The rule of an alarm, its step, and its layer and head."""
    parts = [f"{title_of(str(row['rule']))} at step {row['step']:,}"]
    parts += [f"since step {row['since']:,}"] if row["since"] not in (None, row["step"]) else []
    parts += [f"{name} {row[name]}" for name in ("layer", "head") if row[name] is not None]
    return ", ".join(parts)


def _heads(training: TrainingTables, names: list[str]) -> str:
    of = [name for name in names if training.grid(name).heads > 1]
    return f" (of {', '.join(map(title_of, of))} over heads, too)" if of else ""


def _lines(training: TrainingTables, names: list[str], most: int) -> str:
    """The layers that have a line, in words."""
    layers = len({layer for name in names for layer in training.grid(name).layers})
    return "each layer" if layers <= most else f"{most} of the {layers} layers"


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

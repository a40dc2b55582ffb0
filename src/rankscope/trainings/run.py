"""`TrainingRun`: a training as far as it is written, as a result; `read_training` reads one."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import polars as pl

from rankscope.extras import counted
from rankscope.figures import Chart
from rankscope.results import Plot, Result, Section, Table, sentence
from rankscope.runs import Manifest, Run
from rankscope.trainings.figures import FEW, LINES, STEPS, layer_curves, layer_map, path_shares, run_curves
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

"""What a training run is shown as: measurements as maps and curves, alarms, certificates; and its sentences."""

from math import isfinite
from typing import TYPE_CHECKING

from rankscope.extras import counted
from rankscope.results import Plot, Section, Table, sentence
from rankscope.trainings.figures import FEW, LINES, STEPS, layer_curves, layer_map, path_shares, run_curves
from rankscope.trainings.signals import run_events, run_loss
from rankscope.trainings.spikes import find_spikes
from rankscope.trainings.training import TrainingTables, title_of

if TYPE_CHECKING:
    from rankscope.theory import BoundView

MAPS, PANELS, ALARMS = 8, 6, 200  # Metrics that are drawn as maps, panels of a figure, and alarms of the table, at most


def training_sentences(training: TrainingTables) -> str:
    """A summary in words: how many alarms there were, the first of them, and how the loss went."""
    if not training.steps:
        return "Nothing was measured yet."
    alarms, last = training.alarms.height, training.steps[-1]
    sentences = [f"{counted(alarms, 'alarm')} up to step {last:,}." if alarms else f"No alarms up to step {last:,}."]
    if alarms:
        step, alarm = training.alarms["step"][0], str(training.alarms["sentence"][0])
        when = "" if alarm.startswith(f"Step {step}") else f", at step {step:,}"
        sentences.append(f"The first{when}: {alarm}")
    if "loss" in training.scalars:
        _, values = training.scalar("loss")
        first, now = (f"{value:.3g}" if isfinite(value) else "no number" for value in (values[0], values[-1]))
        sentences.append(f"The loss went from {first} to {now}.")
    loss = run_loss(training)
    if loss is not None and (spikes := find_spikes(loss)):
        when = f"{'the first ' * (len(spikes) > 1)}at step {spikes[0].first:,}"
        sentences.append(f"The loss has {counted(len(spikes), 'spike')}, {when}.")
    if training.forecast:
        sentences.append(f"Forecast: {' '.join(training.forecast)}")
    return " ".join(sentences)


def training_sections(training: TrainingTables) -> list[Section]:
    """The section of what was measured, and that of loss spikes if there are any; none if nothing was measured yet."""
    if not training.steps:
        return []
    count = len(training.steps)
    learning = training.learning
    read = [name for name in training.metrics if name not in learning]
    few = sentence("training", "few", drawn=STEPS, count=count) if count > STEPS else ""
    marks = sentence("training", "marks") if len(training.alarms) else ""
    plots = []
    if shown := (read or learning)[:MAPS]:
        noise = sentence("training", "noise") if any(training.grid(name).noise.any() for name in shown) else ""
        caption = sentence("training", "maps", heads=_heads(training, shown), noise=noise, few=few, marks=marks)
        plots.append(Plot("training", [(title_of(name), layer_map(training, name)) for name in shown], caption))
        curves = [(title_of(name), layer_curves(training, [name])) for name in shown]
        caption = sentence("training", "curves", lines=_lines(training, shown, LINES))
        plots.append(Plot("training-curves", curves, caption))
    if training.scalars:
        scalars = run_curves(training, training.scalars[:PANELS])
        plots.append(Plot("training-run", [("", scalars)], sentence("training", "scalars")))
    if learning:
        caption = sentence("training", "gradients", lines=_lines(training, learning, FEW))
        plots.append(Plot("training-gradients", [("", layer_curves(training, learning))], caption))
    if len(training.paths):
        plots.append(Plot("training-paths", [("", path_shares(training))], sentence("training", "shares")))
    first, last = training.steps[0], training.steps[-1]
    monitored = "; ".join(map(title_of, [*training.metrics, *training.scalars]))
    lead = f"{counted(count, 'measurement')} from step {first:,} to {last:,}. Monitored: {monitored}."
    notes = []
    if training.broken:
        notes.append(f"{counted(training.broken, 'reading')} of samples were no numbers: something overflowed.")
    measured = Section("The training, layer by step", lead, plots, _tables(training), notes, key="training")
    spikes = run_events(training)
    return [measured, *([] if spikes is None else spikes.sections())]


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
    from rankscope.theory.views import quantity, summary_views  # with torch, which reading a run does not need

    ends = list(dict.fromkeys((steps[0], steps[-1])))
    columns = [{view.theorem: view for view in summary_views(training.certificates.filter(step=step))} for step in ends]
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

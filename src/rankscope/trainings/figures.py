"""Figures of a training run: a metric by layer and step as a map, numbers over steps as lines, alarms marked.

The report and the page of `rankscope follow` draw what is described here.
"""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from rankscope import figures as fig
from rankscope.figures import ALARM, LISTED, evenly
from rankscope.trainings.training import NAMES, Grid, TrainingTables, decades, split_stack, title_of

FEWEST, MOST = 5, 40  # Measurements that may stand side by side
EARLY = 0.15  # The part of a training in which half of the measurements lie, where they stand side by side
LABELS = 6  # Steps that are named below them, at most


@dataclass(frozen=True)
class StepAxis:
    """The horizontal axis of a figure by training step: to scale, or with measurements at even distances where most of
    them lie at the beginning (`side_by_side`)."""

    steps: Sequence[int]
    side_by_side: bool

    @classmethod
    def of(cls, steps: Iterable[int]) -> "StepAxis":
        """The axis that suits measurements at these steps.

        >>> StepAxis.of(range(0, 100, 10)).side_by_side, StepAxis.of([0, 10, 20, 40, 80, 160, 320]).side_by_side
        (False, True)
        """
        known = sorted(set(steps))
        crowded = FEWEST <= len(known) <= MOST and (np.median(known) <= known[0] + EARLY * (known[-1] - known[0]))
        return cls(known, bool(crowded))

    def places(self, steps: Sequence[int]) -> list[float]:
        """The coordinates of steps; one between two measurements stands between them."""
        if not self.side_by_side:
            return [*steps]
        places: list[float] = np.interp(steps, self.steps, range(len(self.steps))).tolist()
        return places

    def axis(self, grid: bool = True, range: tuple[float, float] | None = None) -> fig.Axis:
        """The axis of a panel, with its ends if they are given."""
        if not self.side_by_side:
            return fig.Axis("step", steps=True, range=range, grid=grid)
        named = evenly([*enumerate(self.steps)], LABELS)
        labels = {float(x): f"{step:,}" for x, step in named}
        ends = (-0.3, len(self.steps) - 0.7) if range is None else range
        return fig.Axis("step, not to scale", labels=labels, range=ends, grid=grid)


STEPS = 300  # steps drawn at most
LINES, FEW = 9, 6  # layers that have a line at most: in a chart of one panel, of several
MARKS = 40  # steps with alarms that are marked at most
MARKED = 40  # steps up to which each has a mark on its line: a single one must be seen


def layer_map(training: TrainingTables, metric: str) -> fig.Chart:
    """A metric by layer and step, its value as a colour: the logarithm where values span over two decades."""
    grid = _thinned(training, training.grid(metric))
    seen = np.where(grid.noise, np.nan, grid.value)  # the scale is that of what is no rounding noise
    powers = _powers(seen)
    limits = (powers.low, powers.high) if powers is not None else ends(seen)
    hover: list[list[fig.Hover]] = [
        [(f"step {step}, layer {layer}\n", label, "") for step, label in zip(grid.steps, row, strict=True)]
        for layer, row in zip(grid.layers, _numbers(grid), strict=True)
    ]
    colours = _on_axis(grid.value, powers)  # nothing is left: as dark as can be, and its number says 0
    time = StepAxis.of(training.steps)
    places = time.places(grid.steps)
    cells = fig.Heatmap(places, grid.layers, colours, _unit(metric), powers, limits, noise=grid.noise, hover=hover)
    layers, steps, last_step = len(grid.layers), len(grid.steps), training.steps[-1] if training.steps else 0
    last = grid.layers[-1] if grid.layers else 0
    y = fig.Axis("layer", last=last, range=(-0.5, last + 0.5), grid=False)
    marks: list[fig.Heatmap | fig.Points] = [cells, *_rings(training, grid, time)]
    edges = None  # the first cell begins, and the last one ends, half a stride beyond their steps
    if len(places) > 1:
        edges = 1.5 * places[0] - 0.5 * places[1], 1.5 * places[-1] - 0.5 * places[-2]
    x = time.axis(grid=False, range=edges)
    panel = fig.Panel(x, y, marks, flags=_flags(training, time))
    size = f"{layers} layers, {steps} measurements up to step {last_step}"
    alt = f"{title_of(metric)} by layer and step: {size}; {_span(grid)}."
    height = max(340, min(640, 130 + 24 * layers))
    return fig.Chart([panel], _table([grid]), alt, legend=False, height=height, kept=metric)


def layer_curves(training: TrainingTables, metrics: Sequence[str]) -> fig.Chart:
    """A panel for each metric over the steps, a line for each layer, from dark to light with depth."""
    grids = [_thinned(training, training.grid(metric)) for metric in metrics]
    several, time = len(grids) > 1, StepAxis.of(training.steps)
    shown = evenly(sorted({layer for grid in grids for layer in grid.layers}), FEW if several else LINES)
    panels = []
    for grid in grids:
        drawn = np.concatenate([grid.value, grid.floor]) if grid.noise.any() else grid.value
        title, powers, numbers, lines = title_of(grid.metric), _powers(drawn), _numbers(grid), []
        for k, layer in enumerate(shown):
            if layer not in grid.layers:
                continue
            row, name = grid.layers.index(layer), f"layer {layer}"
            texts = [f"{title}\nstep {step}, {name}: " for step in grid.steps]
            values = _on_axis(grid.value[row], powers)
            marks = {"name": name, "group": name, "index": k, "noise": grid.noise[row]}
            lines.append(_line(time.places(grid.steps), values, _shade(k, shown), texts, numbers[row], **marks))
        lines += _floor_line(grid, powers, time)
        y = _value_axis("" if several else _unit(grid.metric), powers, drawn)
        panels.append(_over_steps(training, y, lines, title if several else ""))
    alt = "; ".join(f"{title_of(grid.metric)} over the steps, {_span(grid)}" for grid in grids) + "."
    columns, kept = min(2, len(grids)), ",".join(metrics)
    return fig.Chart(panels, _table(grids), alt, columns=columns, shared=several, kept=kept)


def run_curves(training: TrainingTables, names: Sequence[str]) -> fig.Chart:
    """A panel for each number of the whole run, as the loss and the learning rate, over the steps."""
    panels, time = [], StepAxis.of(training.steps)
    rows: list[tuple[str, int, float]] = []
    for name in names:
        all_steps, numbers = training.scalar(name)
        chosen = evenly(range(len(all_steps)), STEPS)
        steps, values = [all_steps[k] for k in chosen], np.array([numbers[k] for k in chosen])
        rows += zip([name] * len(steps), steps, values.tolist(), strict=True)
        powers = _powers(values)
        texts = [f"step {step}\n{title_of(name)} " for step in steps]
        labels, colour = list(map(_number, values.tolist())), fig.line_colour(0)
        line = _line(time.places(steps), _on_axis(values, powers), colour, texts, labels)
        panels.append(_over_steps(training, _value_axis("", powers, values), [line], title_of(name)))
    table = fig.columns_of(("name", "step", "value"), rows)
    alt = f"{', '.join(map(title_of, names))} over the steps.".capitalize()
    return fig.Chart(panels, table, alt, columns=min(2, len(names)), legend=False, kept="run")


def side_by_side(runs: Mapping[str, TrainingTables], metric: str) -> fig.Chart:
    """Several runs over the steps, by name: their loss, and a metric at the last layer of each, a line for each run."""
    ends_of = {name: _last_layer(training, metric) for name, training in runs.items()}
    losses = {name: _thinned(training, _loss(training)) for name, training in runs.items()}
    panels, grids = [], []
    time = StepAxis.of(step for training in runs.values() for step in training.steps)
    layers = {grid.layers[0] for grid in ends_of.values() if grid.layers}
    at = f"at layer {layers.pop()}" if len(layers) == 1 else "at the last layer of each"
    for heading, lines_of in (("loss", losses), (f"{title_of(metric)} {at}", ends_of)):
        shown = {name: grid for name, grid in lines_of.items() if grid.layers}
        if not shown:
            continue
        drawn = np.concatenate([grid.value.ravel() for grid in shown.values()])
        powers, lines = _powers(drawn), []
        for k, name in enumerate(runs):
            if name not in shown:
                continue
            grid = shown[name]
            texts = [f"{name}\nstep {step}, {heading}: " for step in grid.steps]
            places, values = time.places(grid.steps), _on_axis(grid.value[0], powers)
            marks = {"name": name, "group": name, "index": k, "noise": grid.noise[0]}
            lines.append(_line(places, values, fig.line_colour(k), texts, _numbers(grid)[0], **marks))
            grids.append((name, grid))
        panels.append(fig.Panel(time.axis(), _value_axis("", powers, drawn), lines, heading))
    rows = [
        (name, grid.metric, step, grid.layers[0] if grid.metric == metric else None, value)
        for name, grid in grids
        for step, value in zip(grid.steps, grid.value[0].tolist(), strict=True)
    ]
    table = fig.columns_of(("run", "metric", "step", "layer", "value"), rows)
    alt = f"{len(runs)} runs over the steps: {' and '.join(str(panel.heading) for panel in panels)}."
    return fig.Chart(panels, table, alt, columns=min(2, len(panels)), shared=True, kept=f"runs {metric}")


def _last_layer(training: TrainingTables, metric: str) -> Grid:
    """The values of a metric at the last layer that has it; without a layer where none has."""
    grid = _thinned(training, training.grid(metric))
    return grid._replace(layers=grid.layers[-1:], value=grid.value[-1:], floor=grid.floor[-1:])


def _loss(training: TrainingTables) -> Grid:
    """The loss as if it were of one layer, or of none if there is none."""
    steps, values = training.scalar("loss")
    value = np.array([values] if steps else [], dtype=float).reshape(int(bool(steps)), len(steps))
    return Grid("loss", steps, [0] if steps else [], value, np.zeros_like(value), 0)


def path_shares(training: TrainingTables) -> fig.Chart:
    """What paths of each length carry of the output, over the steps."""
    names, lines, time = training.lengths, [], StepAxis.of(training.steps)
    rows: list[tuple[str, int, float]] = []
    for k, name in enumerate(names):
        part = training.paths.filter(pl.col("of") == name).sort("step")
        part = part[evenly(range(len(part)), STEPS)]
        steps, values = part["step"].to_list(), part["value"].fill_null(math.nan).to_list()
        rows += zip([name] * len(steps), steps, values, strict=True)
        texts, shares = [f"step {step}, {name}\n" for step in steps], [f"{value:.1%}" for value in values]
        lines.append(_line(time.places(steps), values, _shade(k, names), texts, shares, " of the output", name=name))
    bar = fig.ColourBar("length of the path", [name.removeprefix("length ") for name in names])
    panel = _over_steps(training, fig.Axis("share of the output", percent=True), lines)
    table, colour_bar = fig.columns_of(("of", "step", "value"), rows), bar if len(names) > LISTED else None
    return fig.Chart([panel], table, "Path shares over the steps.", colour_bar=colour_bar, kept="paths")


def _line(
    x: list[float], y: fig.Numbers, colour: str, texts: list[str], labels: list[str], after: str = "", **more: Any
) -> fig.Line:
    """A line over the steps, with a dot at each if they are few; (text, label, after) is what a point says, and `more`
    are fields of the line."""
    hover: list[fig.Hover] = [(text, label, after) for text, label in zip(texts, labels, strict=True)]
    return fig.Line(x, y, colour, **{"marker": "dot" if len(x) <= MARKED else None, "hover": hover, **more})


def _floor_line(grid: Grid, powers: fig.Powers | None, time: StepAxis) -> list[fig.Line]:
    """The largest floor of all layers at each step, where a value lies at its floor; none where no value does."""
    if not grid.noise.any():
        return []
    floor = np.fmax.reduce(grid.floor, axis=0)
    texts = [f"floor at step {step}: " for step in grid.steps]
    labels = list(map(_number, floor.tolist()))
    look: dict[str, Any] = {"group": "floor", "index": LINES, "marker": None, "dash": "dot", "width": 1.4}
    places, name = time.places(grid.steps), "floor: below it is rounding noise"
    return [_line(places, _on_axis(floor, powers), "faint", texts, labels, name=name, **look)]


def _shade(k: int, of: Sequence[object]) -> str:
    return fig.ordered_colour(k / max(1, len(of) - 1))


def _over_steps(training: TrainingTables, y: fig.Axis, lines: list[fig.Line], heading: str = "") -> fig.Panel:
    time = StepAxis.of(training.steps)
    return fig.Panel(time.axis(), y, lines, heading, _flags(training, time))


def _thinned(training: TrainingTables, grid: Grid) -> Grid:
    """At most `STEPS` steps: the first, the last and those with alarms among them."""
    if len(grid.steps) <= STEPS:
        return grid
    alarmed = set(training.alarms["step"].to_list()[:MARKS])
    chosen = {k for k, step in enumerate(grid.steps) if step in alarmed}
    at = sorted(chosen | set(evenly(range(len(grid.steps)), STEPS)))
    return grid._replace(steps=[grid.steps[k] for k in at], value=grid.value[:, at], floor=grid.floor[:, at])


def _powers(values: np.ndarray) -> fig.Powers | None:
    """An axis of powers where values span over two decades."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return fig.Powers(np.log10(values[values > 0]).tolist()) if decades(values) > 2 else None


def _on_axis(values: np.ndarray, powers: fig.Powers | None) -> np.ndarray:
    """The coordinates: zero stands at the lower end of an axis of powers."""
    if powers is None:
        return values
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log10(values)
    return np.where(np.isneginf(logs), powers.low, logs)


def _value_axis(title: fig.Formula | str, powers: fig.Powers | None, values: np.ndarray) -> fig.Axis:
    low, high = ends(values)
    flat = powers is None and high - low <= 1e-9 * abs(high) and high  # plotly would draw from -1 to 1
    return fig.Axis(title, powers, range=(min(0.0, 2 * high), max(0.0, 2 * high)) if flat else None)


def _flags(training: TrainingTables, time: StepAxis) -> list[fig.Flag]:
    """The latest steps with an alarm, with its sentences."""
    sentences: dict[int, list[str]] = {}
    for row in training.alarms.iter_rows(named=True):
        sentences.setdefault(row["step"], [f"alarm at step {row['step']}"]).append(_wrapped(row["sentence"]))
    latest = list(sentences)[-MARKS:]
    places = zip(time.places(latest), latest, strict=True)
    return [fig.Flag(x, "\n".join(sentences[step])) for x, step in places]


def _rings(training: TrainingTables, grid: Grid, time: StepAxis) -> list[fig.Points]:
    """Where an alarm names a layer of the stack that is drawn, a ring at its place."""
    stack = split_stack(grid.metric)[1]
    stack_names = [name for name in {split_stack(metric)[1] for metric in training.metrics} if name not in ("", stack)]
    elsewhere = pl.any_horizontal(pl.lit(False), *(pl.col("rule").str.ends_with(f"/{name}") for name in stack_names))
    rows = training.alarms.filter(pl.col("layer").is_in(grid.layers), ~elsewhere).tail(MARKS)
    hover: list[fig.Hover] = [
        (f"alarm at step {row['step']}, layer {row['layer']}\n{_wrapped(row['sentence'])}", "", "")
        for row in rows.iter_rows(named=True)
    ]
    places = time.places(rows["step"].to_list())
    points = fig.Points(places, rows["layer"].to_list(), ALARM, "ring", 10, 1.0, hover=hover)
    return [points] if hover else []


def _wrapped(sentence: object) -> str:
    return "\n".join(textwrap.wrap(str(sentence), 70)[:8])


def _unit(metric: str) -> fig.Formula | str:
    plain = split_stack(metric)[0]
    if plain in NAMES:
        return title_of(metric)
    from rankscope.metrics import symbol_of  # with torch, which is not waited for before a page has its address

    return fig.Formula(symbol_of(plain), symbol_of(plain, tex=True))


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "no number"


def _numbers(grid: Grid) -> list[list[str]]:
    notes = np.where(grid.noise, ", at its floor: rounding noise", "").tolist()
    rows = zip(grid.value.tolist(), notes, strict=True)
    return [[_number(value) + note for value, note in zip(*row, strict=True)] for row in rows]


def ends(values: np.ndarray) -> tuple[float, float]:
    """The least and the largest finite value; 0 and 1 if there is none."""
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)


def _span(grid: Grid) -> str:
    noise = ", some at their floor" if grid.noise.any() else ""
    return "from {:.3g} to {:.3g}".format(*ends(grid.value)) + noise


def _table(grids: Sequence[Grid]) -> dict[str, list[object]]:
    """For CSV: what is drawn."""
    rows = [
        (grid.metric, step, layer, grid.value[row, k], grid.floor[row, k])
        for grid in grids
        for row, layer in enumerate(grid.layers)
        for k, step in enumerate(grid.steps)
    ]
    return fig.columns_of(("metric", "step", "layer", "value", "floor"), rows)

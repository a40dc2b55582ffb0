"""Figures of a training run: a metric by layer and step as a map, numbers over steps as lines, alarms marked.

The report and the page of `rankscope follow` draw what is described here.
"""

import math
import textwrap
from collections.abc import Sequence

import numpy as np
import polars as pl

from rankscope.figures import description as fig
from rankscope.figures.style import ALARM, LISTED, evenly
from rankscope.metrics import symbol_of
from rankscope.runs.training import NAMES, Grid, TrainingRun, decades, title_of

STEPS = 300  # steps drawn at most
LINES, FEW = 9, 6  # layers that have a line at most: in a chart of one panel, of several
MARKS = 40  # steps with alarms that are marked at most
MARKED = 40  # steps up to which each has a mark on its line: a single one must be seen


def metric_title(metric: str) -> fig.Formula:
    """The symbol of a metric, as an axis has it."""
    return fig.Formula(symbol_of(metric), symbol_of(metric, tex=True))


def layer_map(training: TrainingRun, metric: str) -> fig.Chart:
    """A metric by layer and step, its value as a colour: the logarithm where values span over two decades."""
    grid = _thinned(training, training.grid(metric))
    powers = _powers(grid.value)
    numbers = _on_axis(grid.value, powers)  # nothing is left: as dark as can be, and its number says 0
    hover: list[list[fig.Hover]] = [
        [(f"step {step}, layer {layer}\n", index, "") for step, index in zip(grid.steps, row, strict=True)]
        for layer, row in zip(grid.layers, _numbers(grid), strict=True)
    ]
    limits = (powers.low, powers.high) if powers is not None else ends(grid.value)
    cells = fig.Heatmap(grid.steps, grid.layers, numbers, _unit(metric), powers, limits, hover=hover)
    last, steps = grid.layers[-1] if grid.layers else 0, training.steps[-1] if training.steps else 0
    y = fig.Axis("layer", last=last, range=(-0.5, last + 0.5), grid=False)
    marks: list[fig.Heatmap | fig.Points] = [cells, *_rings(training, grid)]
    x = fig.Axis("step", steps=True, grid=False)
    return fig.Chart(
        [fig.Panel(x, y, marks, flags=_flags(training))], _table([grid]),
        f"{title_of(metric)} by layer and step: {len(grid.layers)} layers, {len(grid.steps)} measurements up "
        f"to step {steps}; {_span(grid.value)}.",
        legend=False, height=max(340, min(640, 130 + 24 * len(grid.layers))), kept=metric,
    )  # fmt: skip


def layer_curves(training: TrainingRun, metrics: Sequence[str]) -> fig.Chart:
    """A panel for each metric over the steps, a line for each layer, from dark to light with depth."""
    grids = [_thinned(training, training.grid(metric)) for metric in metrics]
    several = len(grids) > 1
    shown = evenly(sorted({layer for grid in grids for layer in grid.layers}), FEW if several else LINES)
    panels = []
    for grid in grids:
        powers, numbers = _powers(grid.value), _numbers(grid)
        lines = []
        for k, layer in enumerate(shown):
            if layer not in grid.layers:
                continue
            row, name = grid.layers.index(layer), f"layer {layer}"
            hover: list[fig.Hover] = [
                (f"{title_of(grid.metric)}\nstep {step}, {name}: ", index, "")
                for step, index in zip(grid.steps, numbers[row], strict=True)
            ]
            colour = fig.ordered_colour(k / max(1, len(shown) - 1))
            lines.append(fig.Line(
                grid.steps, _on_axis(grid.value[row], powers), colour, name, name, marker=_mark(grid.steps),
                noise=grid.noise[row], hover=hover,
            ))  # fmt: skip
        y = _value_axis("" if several else _unit(grid.metric), powers, grid.value)
        heading = title_of(grid.metric) if several else ""
        panels.append(fig.Panel(fig.Axis("step", steps=True), y, lines, heading, _flags(training)))
    sentences = [f"{title_of(grid.metric)} over the steps, {_span(grid.value)}" for grid in grids]
    return fig.Chart(
        panels, _table(grids), "; ".join(sentences) + ".", columns=min(2, len(grids)), shared=several,
        kept=",".join(metrics),
    )  # fmt: skip


def run_curves(training: TrainingRun, names: Sequence[str]) -> fig.Chart:
    """A panel for each number of the whole run, as the loss and the learning rate, over the steps."""
    panels = []
    rows: list[tuple[str, int, float]] = []
    for name in names:
        every, numbers = training.scalar(name)
        chosen = evenly(range(len(every)), STEPS)
        steps, values = [every[k] for k in chosen], np.array([numbers[k] for k in chosen])
        rows += zip([name] * len(steps), steps, values.tolist(), strict=True)
        powers = _powers(values)
        hover: list[fig.Hover] = [
            (f"step {step}\n{title_of(name)} ", _number(value), "")
            for step, value in zip(steps, values.tolist(), strict=True)
        ]
        line = fig.Line(steps, _on_axis(values, powers), fig.line_colour(0), marker=_mark(steps), hover=hover)
        y = _value_axis("", powers, values)
        panels.append(fig.Panel(fig.Axis("step", steps=True), y, [line], title_of(name), _flags(training)))
    return fig.Chart(
        panels, fig.columns_of(("name", "step", "value"), rows),
        f"{', '.join(map(title_of, names))} over the steps.".capitalize(),
        columns=min(2, len(names)), legend=False, kept="run",
    )  # fmt: skip


def path_shares(training: TrainingRun) -> fig.Chart:
    """What paths of each length carry of the output, over the steps."""
    names, lines = training.lengths, []
    rows: list[tuple[str, int, float]] = []
    for k, name in enumerate(names):
        part = training.paths.filter(pl.col("of") == name).sort("step")
        part = part[evenly(range(len(part)), STEPS)]
        steps, values = part["step"].to_list(), part["value"].fill_null(math.nan).to_list()
        rows += zip([name] * len(steps), steps, values, strict=True)
        hover: list[fig.Hover] = [
            (f"step {step}, {name}\n", f"{value:.1%}", " of the output")
            for step, value in zip(steps, values, strict=True)
        ]
        colour = fig.ordered_colour(k / max(1, len(names) - 1))
        lines.append(fig.Line(steps, values, colour, name, marker=_mark(steps), hover=hover))
    bar = fig.ColourBar("length of the path", [name.removeprefix("length ") for name in names])
    panel = fig.Panel(
        fig.Axis("step", steps=True), fig.Axis("share of the output", percent=True), lines, flags=_flags(training)
    )
    return fig.Chart(
        [panel], fig.columns_of(("of", "step", "value"), rows), "Path shares over the steps.",
        colour_bar=bar if len(names) > LISTED else None, kept="paths",
    )  # fmt: skip


def _thinned(training: TrainingRun, grid: Grid) -> Grid:
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


def _mark(steps: Sequence[int]) -> str | None:
    return "dot" if len(steps) <= MARKED else None


def _flags(training: TrainingRun) -> list[fig.Flag]:
    """The latest steps with an alarm, with its sentences."""
    sentences: dict[int, list[str]] = {}
    for row in training.alarms.iter_rows(named=True):
        sentences.setdefault(row["step"], [f"alarm at step {row['step']}"]).append(_wrapped(row["sentence"]))
    return [fig.Flag(step, "\n".join(sentences[step])) for step in list(sentences)[-MARKS:]]


def _rings(training: TrainingRun, grid: Grid) -> list[fig.Points]:
    """Where an alarm names a layer, a ring at its place."""
    rows = training.alarms.filter(pl.col("layer").is_in(grid.layers)).tail(MARKS)
    hover: list[fig.Hover] = [
        (f"alarm at step {row['step']}, layer {row['layer']}\n{_wrapped(row['sentence'])}", "", "")
        for row in rows.iter_rows(named=True)
    ]
    points = fig.Points(rows["step"].to_list(), rows["layer"].to_list(), ALARM, "ring", 10, 1.0, hover=hover)
    return [points] if hover else []


def _wrapped(sentence: object) -> str:
    return "\n".join(textwrap.wrap(str(sentence), 70)[:8])


def _unit(metric: str) -> fig.Formula | str:
    return NAMES[metric] if metric in NAMES else metric_title(metric)


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


def _span(values: np.ndarray) -> str:
    return "from {:.3g} to {:.3g}".format(*ends(values))


def _table(grids: Sequence[Grid]) -> dict[str, list[object]]:
    """For CSV: what is drawn."""
    rows = [
        (grid.metric, step, layer, grid.value[row, k], grid.floor[row, k])
        for grid in grids
        for row, layer in enumerate(grid.layers)
        for k, step in enumerate(grid.steps)
    ]
    return fig.columns_of(("metric", "step", "layer", "value", "floor"), rows)

"""Figures of a training run: what is drawn is what was measured, thinned where there is much."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from rankscope.figures import plot
from rankscope.figures.description import Heatmap, Line, Points
from rankscope.figures.page import page_figure
from rankscope.monitor.measurement import Measurement
from rankscope.trainings import TRAINING, read_training
from rankscope.trainings.figures import STEPS, layer_curves, layer_map, path_shares, run_curves
from tests.made_trainings import ALARM, falling, learned, measurement, opened, row, written


def test_a_map_has_a_cell_for_each_layer_and_step_and_a_ring_for_its_alarm(tmp_path: Path) -> None:
    training = read_training(written(tmp_path))
    (panel,) = layer_map(training, "relative_residual").panels
    cells, rings = panel.marks
    assert isinstance(cells, Heatmap) and isinstance(rings, Points)
    logs = [[math.log10(falling(step, layer)) for step in range(0, 60, 10)] for layer in range(4)]
    assert np.allclose(cells.values, logs) and (list(rings.x), list(rings.y)) == ([ALARM.step], [ALARM.layer])
    assert [flag.x for flag in panel.flags] == [ALARM.step] and panel.x.range == (-5.0, 55.0)


def test_steps_that_double_stand_side_by_side(tmp_path: Path) -> None:
    """An alarm between two measurements stands between them, at its share of the way."""
    steps = [0, 10, 20, 40, 80, 160, 320, 640]
    writer = opened(tmp_path)
    for step in steps:
        writer.write(measurement(step))
    writer.write(Measurement(240, measurement(240).rows.clear(), (replace(ALARM, step=240),)))
    writer.close()
    training = read_training(tmp_path)
    (panel,) = layer_map(training, "relative_residual").panels
    cells, rings = panel.marks
    assert isinstance(cells, Heatmap) and isinstance(rings, Points)
    assert list(cells.x) == [*range(8)] and panel.x.range == (-0.5, 7.5) and list(rings.x) == [5.5]
    assert [flag.x for flag in panel.flags] == [5.5]
    assert panel.x.labels is not None and all(f"{steps[int(x)]}" == name for x, name in panel.x.labels.items())
    for chart in (layer_curves(training, ["relative_residual"]), run_curves(training, ["loss"])):
        (panel,) = chart.panels
        lines = [mark for mark in panel.marks if isinstance(mark, Line)]
        assert lines and all(list(line.x) == [*range(8)] for line in lines) and panel.x.labels is not None


def test_what_lies_below_its_floor_is_grey_in_the_map_and_dotted_in_the_curves(tmp_path: Path) -> None:
    writer = opened(tmp_path, ("relative_mu",))
    for step, value in ((0, 0.5), (10, 6e-8)):
        rows = [row(step, layer, "relative_mu", x, floor=9.5e-7) for layer, x in ((1, 0.5), (2, value))]
        writer.write(Measurement(step, pl.DataFrame(rows, schema=TRAINING)))
    writer.close()
    training, noise = read_training(tmp_path), [[False, False], [False, True]]
    chart = layer_map(training, "relative_mu")
    cells = chart.panels[0].marks[0]
    assert isinstance(cells, Heatmap) and cells.noise is not None and cells.noise.tolist() == noise
    assert cells.range == (0.5, 0.5), "noise is not on the scale"
    shown, grey, *_ = page_figure(chart)["data"]
    assert shown["z"] == [[0.5, 0.5], [0.5, None]] and grey["z"] == [[None, None], [None, 0.0]]
    grey_cells: Any = plot(chart).axes[0].collections[1].get_array()
    assert grey_cells.mask.tolist() == [[True, True], [True, False]]
    lines = layer_curves(training, ["relative_mu"]).panels[0].marks
    assert [line.noise.tolist() for line in lines[:2] if isinstance(line, Line) and line.noise is not None] == noise
    assert isinstance(lines[2], Line) and lines[2].group == "floor"
    assert np.allclose(lines[2].y, math.log10(9.5e-7))


def test_one_metric_has_more_lines_than_each_of_several_which_are_named_above(tmp_path: Path) -> None:
    training = read_training(written(tmp_path, range(0, 30, 10), layers=11))
    (alone,) = layer_curves(training, ["relative_residual"]).panels
    several = layer_curves(training, ["relative_residual", "relative_residual"])
    for panels, count in (([alone], 9), (several.panels, 6)):
        for panel in panels:
            layers = [mark.name for mark in panel.marks if isinstance(mark, Line)]
            assert len(layers) == count and (layers[0], layers[-1]) == ("layer 0", "layer 11")
    assert (alone.heading, [panel.heading for panel in several.panels]) == ("", ["relative residual"] * 2)


@pytest.mark.slow
def test_a_long_run_is_thinned_and_keeps_its_ends_and_alarms(tmp_path: Path) -> None:
    training = read_training(written(tmp_path, range(3 * STEPS)))
    chart = layer_curves(training, ["relative_residual"])
    first = chart.panels[0].marks[0]
    assert isinstance(first, Line) and first.marker is None
    assert first.x[0] == 0 and first.x[-1] == 3 * STEPS - 1 and ALARM.step in first.x and len(first.x) <= STEPS + 1
    (loss,) = run_curves(training, ["loss"]).panels[0].marks
    assert isinstance(loss, Line) and len(loss.x) == STEPS
    assert [float(y) for y in loss.y] == [4.0 - step / 100 for step in loss.x]


def test_paths_have_a_line_for_each_length(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    for step in (0, 10):
        writer.write(measurement(step, more=learned(step)))
    writer.close()
    (panel,) = path_shares(read_training(tmp_path)).panels
    lines = [mark for mark in panel.marks if isinstance(mark, Line)]
    assert [(line.name, list(line.y)) for line in lines] == [(f"length {n}", [n / 6, n / 6]) for n in range(4)]
    assert len({line.colour for line in lines}) == 4 and {line.marker for line in lines} == {"dot"}

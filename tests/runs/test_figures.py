"""Figures of a training run: what is drawn is what was measured, thinned where there is much."""

import math
from pathlib import Path

import numpy as np

from rankscope.figures.description import Heatmap, Line, Points
from rankscope.runs.figures import STEPS, layer_curves, layer_map, path_shares, run_curves
from rankscope.runs.training import read_training
from tests.trainings import ALARM, falling, learned, measurement, opened, written


def test_a_map_has_a_cell_for_each_layer_and_step_and_a_ring_for_its_alarm(tmp_path: Path) -> None:
    training = read_training(written(tmp_path))
    (panel,) = layer_map(training, "relative_residual").panels
    cells, rings = panel.marks
    assert isinstance(cells, Heatmap) and isinstance(rings, Points)
    logs = [[math.log10(falling(step, layer)) for step in range(0, 60, 10)] for layer in range(4)]
    assert np.allclose(cells.values, logs) and (list(rings.x), list(rings.y)) == ([ALARM.step], [ALARM.layer])
    assert [flag.x for flag in panel.flags] == [ALARM.step]


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

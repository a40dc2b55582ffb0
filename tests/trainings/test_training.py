"""A training run as it is read: by metric, layer and step, while it is written and after it was cut."""

import math
from pathlib import Path

import numpy as np
import polars as pl

from rankscope.errors import FileError, MetricError
from rankscope.runs import Store
from rankscope.trainings import read_training
from rankscope.trainings.training import decades, path_name, stamp
from tests.made_trainings import ALARM, falling, learned, measurement, opened, row, written
from tests.raising import raises


def test_a_grid_has_the_mean_over_heads_and_nan_where_there_is_no_number(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    heads = [row(10, 1, "entropy", value, head=head, floor=0.5) for head, value in enumerate((0.2, 0.6))]
    writer.write(measurement(0, layers=2))
    writer.write(measurement(10, layers=1, more=heads))
    writer.close()
    training = read_training(tmp_path)
    grid = training.grid("relative_residual")
    assert (grid.steps, grid.layers, grid.heads) == ([0, 10], [0, 1, 2], 0)
    assert grid.value[1].tolist() == [falling(0, 1), falling(10, 1)] and np.isnan(grid.value[2, 1])
    assert grid.logs(0) == {step: math.log10(falling(step, 0)) for step in (0, 10)} and grid.logs(7) == {}
    entropy = training.grid("entropy")
    assert entropy.value.tolist() == [[0.4]] and entropy.heads == 2 and entropy.noise.all() and entropy.logs(1) == {}


def test_a_number_below_zero_is_noise_by_its_size(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    values = [row(0, layer, "uniformity", value, floor=1e-6) for layer, value in enumerate((-2.0, -1e-7, 0.5))]
    writer.write(measurement(0, layers=2, more=values))
    writer.close()
    assert read_training(tmp_path).grid("uniformity").noise.tolist() == [[False], [True], [False]]


def test_metrics_numbers_and_paths_are_told_apart(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    writer.write(measurement(30, alarms=[ALARM], more=learned(30)))
    training = read_training(tmp_path)  # while it is being written
    assert training.metrics == ["relative_residual", "grad_mlp"] and training.scalars == ["loss", "lr"]
    assert training.learning == ["grad_mlp"]
    assert training.lengths == [f"length {length}" for length in range(4)] and training.name == "SmallGPT"
    assert training.paths["value"].to_list() == [length / 6 for length in range(4)]
    assert training.scalar("loss") == ([30], [3.7]) and training.alarms["since"].to_list() == [20]
    assert training.metric() == "relative_residual" and not len(training.certificates)
    with raises(MetricError, subject="relative_res"):
        training.metric("relative_res")
    writer.close()


def test_the_stamp_changes_with_what_is_written(tmp_path: Path) -> None:
    before = stamp(tmp_path)
    writer = opened(tmp_path)
    stamps = [before, stamp(tmp_path)]
    for step in (0, 10):
        writer.write(measurement(step))
        stamps.append(stamp(tmp_path))
    assert len(set(stamps)) == 4 and stamp(tmp_path) == stamps[-1]
    writer.cut(0)
    assert stamp(tmp_path) != stamps[-1] and read_training(tmp_path).steps == [0]
    writer.close()


def test_a_folder_without_a_training_or_with_a_damaged_one_is_refused(tmp_path: Path) -> None:
    with raises(FileError, subject=str(tmp_path / "none")):
        read_training(tmp_path / "none")
    with raises(FileError, subject=str(tmp_path)):
        read_training(tmp_path)
    for name, damaged in (("lacks", pl.DataFrame({"step": [1]})), ("unnamed", None)):
        run = written(tmp_path / name)
        table = read_training(run).table.with_columns(metric=pl.lit(None, pl.String)) if damaged is None else damaged
        with Store(run) as store:
            for chunk in store.run.chunks("training"):
                store.drop(chunk)
            store.append("training", "training", table, store.run.manifests["training"])
        with raises(FileError, subject=str(run / "training")):
            read_training(run)


def test_decades_are_those_of_positive_values() -> None:
    assert decades(np.array([0.0, 1e-3, 10.0, np.nan, np.inf])) == 4
    assert decades(np.array([-1.0, 1e-9, 1.0])) == decades(np.array([0.0])) == 0


def test_numbers_of_the_run_begin_with_the_loss_and_the_learning_rate(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    writer.write(measurement(0, more=[row(0, None, name, 0.5) for name in ("accuracy", "zloss", "beta")]))
    writer.close()
    first, second, *others = read_training(tmp_path).scalars
    assert (first, second, sorted(others)) == ("loss", "lr", ["accuracy", "beta", "zloss"])


def test_paths_are_named_by_what_they_are_of() -> None:
    named = {
        ("paths_2", None): "length 2", ("paths_share", 3): "length 3", ("paths_residual_share", 3):
        "residual share, length 3", ("paths_bias", None): "bias", ("paths_no_bias", None): "no bias",
    }  # fmt: skip
    assert {key: path_name(*key) for key in named} == named

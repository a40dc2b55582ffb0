"""The row of a remedy: trainings join it whether or not all of them are there."""

import time
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from rankscope.lab import Copying, Recipe, Training
from rankscope_studies import Setup
from rankscope_studies.remedies import training_results as results
from rankscope_studies.remedies.measurements import RemedyMeasurements, rows
from rankscope_studies.remedies.study import RemedyOptions, result_of
from rankscope_studies.remedies.verdicts import AGREES, UNTOLD, comparisons
from study_tests.remedies.builders import FEW, SEEDS


@pytest.fixture(scope="module")
def trained() -> tuple[pl.DataFrame, pl.DataFrame]:
    """Two seeds of a real, tiny training, with and without a remedy: (trainings, costs)."""
    task = Copying(symbols=4, length=3)
    numbers_of, times = [], []
    for remedy in ("none", "attnscale"):
        start = time.perf_counter()
        training = Training(
            task, task.architecture(2, 8, 2), Recipe(steps=3), seeds=SEEDS,
            remedies=[] if remedy == "none" else [remedy],
        ).finish()  # fmt: skip
        times.append({"remedy": remedy, "setting": "pre", "depth": 2, "seed": None,
                      "quantity": results.PRICE, "value": (time.perf_counter() - start) / 3})  # fmt: skip
        for seed, tried in zip(SEEDS, training.evaluate(32), strict=True):
            numbers = {"loss": tried.loss, "accuracy": tried.accuracy, "relative_residual_at_0": -0.1,
                       "relative_residual_at_1": -0.2, "relative_residual_at_2": -1.5 - seed,
                       "path_share_0": 0.25, "path_share_2": 0.75}  # fmt: skip
            numbers_of += [{"remedy": remedy, "setting": "pre", "depth": 2, "seed": seed, "quantity": quantity,
                       "value": value} for quantity, value in numbers.items()]  # fmt: skip
    return pl.DataFrame(numbers_of), pl.DataFrame(times)


@pytest.mark.slow
def test_trainings_join_where_they_are_there(
    tables: RemedyMeasurements, trained: tuple[pl.DataFrame, pl.DataFrame]
) -> None:
    both = replace(tables, trained=results.completed(trained[0]), costs=results.priced(trained[1]))
    table = rows(both)
    assert table["remedy"].to_list() == list(FEW)
    losses = trained[0].filter(remedy="attnscale", quantity="loss")["value"]
    by_name = {row["remedy"]: row for row in table.iter_rows(named=True)}
    assert by_name["attnscale"]["trained_pre_loss"] == pytest.approx(losses.median())
    assert max(losses.to_list()) < 2.5 and by_name["attnscale"]["learns_pre"] == 2.0
    assert by_name["gate"]["trained_pre_loss"] is None
    assert by_name["none"]["time_ratio"] == pytest.approx(1.0) and by_name["attnscale"]["time_ratio"] > 0
    assert results.path_length(both.trained, "none", "pre", 2, 0) == pytest.approx(1.5)
    came = result_of(Setup(Path("unused")), RemedyOptions(("attnscale", "gate")), both)
    assert "price" in came.figures and "Not trained: rezero, lnscale, gate." in came.notes
    without = result_of(Setup(Path("unused")), RemedyOptions(("attnscale", "gate")), tables)
    assert "price" not in without.figures
    assert any("Nothing was trained: rankscope remedies --train" in note for note in without.notes)
    verdicts = {one.what: one.verdict for one in comparisons(tables)}
    assert verdicts["gate: a lower loss"] == UNTOLD
    assert verdicts["none: without skips collapse is doubly exponential"] == AGREES

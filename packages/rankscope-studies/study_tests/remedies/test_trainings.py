"""The table of trained remedies: kept trial by trial, the same in several processes; and what steps cost."""

from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from rankscope.errors import StudyError
from rankscope_studies.remedies.trainings import QUICK, TrainingPlan, costs, gathered, trained
from rankscope_studies.study import Setup
from rankscope_studies.trial import TrialSizes
from tests.raising import raises

SIZES = TrialSizes(width=8, heads=2, context=6, batch=2, steps=3, evaluation_samples=4, probe_samples=2)
REMEDIES = ["none", "deepnorm"]


def table(folder: Path, workers: int = 1, minutes: float = 60.0) -> pl.DataFrame:
    plan = TrainingPlan(("pre",), (1, 2), SIZES, seeds=(0, 1))
    return trained(Setup(folder), REMEDIES, plan, workers=workers, minutes=minutes)


def test_a_table_goes_on_where_it_was_left_off(tmp_path: Path) -> None:
    late = table(tmp_path / "one", minutes=0.0)
    assert len(late) == 4 and late["refused"].str.starts_with("not run").all()
    whole = table(tmp_path / "one")
    assert whole.group_by("remedy", "depth", maintain_order=True).len().height == 4
    assert whole.filter(remedy="deepnorm")["refused"].str.contains("norm_place").all()
    parts = sorted((tmp_path / "one" / "parts").iterdir())
    times = [part.stat().st_mtime_ns for part in parts]
    parts[1].unlink()
    assert_frame_equal(table(tmp_path / "one"), whole)
    again = [part.stat().st_mtime_ns for part in parts]
    assert len(parts) == 4 and [a == b for a, b in zip(times, again, strict=True)].count(False) == 1
    order = ["remedy", "depth", "seed", "quantity"]
    assert_frame_equal(gathered(tmp_path / "one").sort(order), whole.sort(order))
    assert gathered(tmp_path / "none").is_empty()


@pytest.mark.slow  # each process imports torch
def test_a_table_is_the_same_in_several_processes(tmp_path: Path) -> None:
    assert_frame_equal(table(tmp_path / "two", workers=2), table(tmp_path / "one"))


def test_one_remedy_twice_is_refused(tmp_path: Path) -> None:
    with raises(StudyError, subject="remedies"):
        trained(Setup(tmp_path), ["none", "none"], QUICK)


@pytest.mark.slow
def test_a_remedy_is_priced_against_none_where_it_goes(tmp_path: Path) -> None:
    timed = costs(Setup(tmp_path), ["attnscale", "deepnorm"], depth=1, sizes=SIZES)
    ratio = timed.filter(quantity="ratio")
    assert {*ratio.select("remedy", "setting").iter_rows()} == {
        ("attnscale", "pre"), ("none", "pre"), ("deepnorm", "post"), ("none", "post"),
    }  # fmt: skip
    assert ratio.filter(remedy="none")["value"].to_list() == [1.0, 1.0]
    assert (timed.filter(quantity="seconds_per_step")["value"] > 0).all()
    added = dict(timed.filter(quantity="parameters_added").select("remedy", "value").iter_rows())
    assert added == {"attnscale": 2, "deepnorm": 0, "none": 0}

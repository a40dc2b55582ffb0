"""Studies of questions of one's own: what they compute, and the command."""

import math
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest

from rankscope.cli.study import STUDIES
from rankscope.errors import StudyError
from rankscope.studies.questions import QUESTIONS, questions
from rankscope.studies.questions.hysteresis import (
    COLLAPSED,
    LOWEST,
    PHASES,
    QUESTION,
    Sizes,
    trajectory,
    turning_points,
)
from rankscope.studies.study import Setup

SIZES = Sizes(depths=(2,), width=16, seeds=1, settle=4, ramp=8, every=4)


def test_studies_are_found_by_name() -> None:
    assert {question.name for question in QUESTIONS} == set(STUDIES)
    assert questions("all") == list(QUESTIONS)
    with pytest.raises(StudyError):
        questions("nothing")


def test_skips_fall_stay_and_rise() -> None:
    schedule = [SIZES.weight(step) for step in range(SIZES.steps)]
    assert [phase for phase, _ in schedule] == [
        phase for phase, count in zip(PHASES, (4, 8, 2, 8, 4), strict=True) for _ in range(count)
    ]
    down = [weight for phase, weight in schedule if phase == "down"]
    up = [weight for phase, weight in schedule if phase == "up"]
    assert down == sorted(down, reverse=True) and up == sorted(up)
    assert down[-1] == pytest.approx(LOWEST) and up[-1] == pytest.approx(1.0)
    ratios = [b / a for a, b in pairwise(down)]
    assert ratios == pytest.approx([LOWEST ** (1 / 8)] * 7)


def path(gradients: dict[str, list[tuple[float, float]]]) -> pl.DataFrame:
    """A trajectory of given (weight, gradient) in each phase."""
    rows = [{"phase": phase, "weight": w, "gradient": g} for phase in PHASES for w, g in gradients.get(phase, [])]
    return pl.DataFrame(rows).with_row_index("step")


def test_turning_points_are_where_the_gradient_crosses() -> None:
    low, high = COLLAPSED - 1, COLLAPSED + 1
    down = [(0.5, high), (0.1, low), (0.05, low)]
    found = turning_points(path({"down": down, "up": [(0.05, low), (0.3, low), (0.6, high), (1.0, high)]}))
    assert found == (0.1, 0.6)
    stays, never = (turning_points(path({"down": down, "up": [(1.0, low)]})), turning_points(path({"down": down[:1]})))
    assert stays[0] == 0.1 and math.isnan(stays[1]) and all(map(math.isnan, never))


@pytest.mark.slow
def test_a_trajectory_has_the_weights_it_says() -> None:
    """Skips of the network that is trained are those of the schedule, and what is read is of that network."""
    rows = list(trajectory(2, 0, SIZES))
    assert [row["step"] for row in rows] == [4, 8, 12, 16, 20, 24]
    assert [row["weight"] for row in rows] == [SIZES.weight(int(row["step"]) - 1)[1] for row in rows]
    assert all(float(row["residual"]) < 0.5 and math.isfinite(float(row["gradient"])) for row in rows)
    assert rows[2]["gradient"] != rows[0]["gradient"]


@pytest.mark.slow  # trains, and draws
def test_the_study_is_answered_and_resumed(tmp_path: Path) -> None:
    result = QUESTION.run(Setup(tmp_path), SIZES)
    assert result.tables["trajectories"].height == 6 and len(result.page_tables[0].rows) == 1
    assert "networks collapse" in result.summary and len(result.comparisons) == 2 and result.figures["hysteresis"].axes
    assert QUESTION.run(Setup(tmp_path), SIZES).tables["trajectories"].equals(result.tables["trajectories"])


def test_the_answer_on_hysteresis_follows_its_trajectories() -> None:
    low, high = COLLAPSED - 1, COLLAPSED + 1
    down = [(0.5, high), (0.05, low)]
    at_once = path({"down": down, "up": [(0.06, high), (1.0, high)]})
    late = path({"down": down, "up": [(0.06, low), (1.0, high)]})
    answers = [
        QUESTION.answer({"trajectories": table.with_columns(layers=2, seed=0, residual=-3.0)}, SIZES)
        for table in (at_once, late)
    ]
    assert [answer.verdicts[1].holds for answer in answers] == [False, True]
    assert "1.2 times" in answers[0].sentence and "20.0 times" in answers[1].sentence

"""Hysteresis: the schedule of skips, where a trajectory turns, and the answer from made-up trajectories."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from rankscope_studies.questions.hysteresis import (
    COLLAPSED,
    EQUAL,
    LEARNT,
    LOWEST,
    PHASES,
    PUBLISHED_WEIGHTS,
    QUESTION,
    Sizes,
    SkipSchedule,
    points_of,
    trajectory,
    turning_points,
)
from rankscope_studies.study import Setup

SIZES = Sizes(depths=(2,), width=16, context=8, batch=4, lr=1e-3, seeds=1, settle=4, ramps=(8, 16), readings=2)
FINE = replace(SIZES, ramps=(80, 160), readings=40)


def test_skips_fall_stay_and_rise() -> None:
    plan = SkipSchedule(settle=4, ramp=8)
    schedule = [plan.weight(step) for step in range(plan.steps)]
    assert [phase for phase, _ in schedule] == [
        phase for phase, count in zip(PHASES, (4, 8, 2, 8, 4), strict=True) for _ in range(count)
    ]
    down = [weight for phase, weight in schedule if phase == "down"]
    up = [weight for phase, weight in schedule if phase == "up"]
    assert down == sorted(down, reverse=True) and up == sorted(up)
    assert down[-1] == pytest.approx(LOWEST) and up[-1] == pytest.approx(1.0)
    ratios = [b / a for a, b in pairwise(down)]
    assert ratios == pytest.approx([ratios[0]] * len(ratios))


@pytest.mark.parametrize("sizes", [QUESTION.quick, QUESTION.full])
def test_ramps_are_read_at_the_same_weights_beyond_the_published_ones(sizes: Sizes) -> None:
    short, long = sizes.ramps
    assert long == 2 * short and short % sizes.readings == sizes.settle % (long // sizes.readings) == 0
    assert sizes.factor**sizes.readings == pytest.approx(1 / LOWEST) and PUBLISHED_WEIGHTS[0] / sizes.factor > LOWEST


Readings = Mapping[str, Sequence[tuple[float, float]]]  # (weight, log10 of the gradient) by phase


def path(gradients: Readings, ramp: int = 80, residual: float = 0.0, seed: int = 0) -> pl.DataFrame:
    """A trajectory of given readings in each phase; the residual is the same throughout."""
    rows = [{"phase": phase, "weight": w, "gradient": g} for phase in PHASES for w, g in gradients.get(phase, [])]
    return pl.DataFrame(rows).with_row_index("step").with_columns(
        layers=2, seed=seed, ramp=ramp, residual=pl.lit(residual), loss=pl.lit(2.0), blind=pl.lit(3.0)
    )  # fmt: skip


LOW, HIGH = COLLAPSED - 1, COLLAPSED + 1


def loop(collapse: float, recovery: float, ramp: int = 80, sizes: Sizes = FINE, seed: int = 0) -> pl.DataFrame:
    """A trajectory on the weights of the readings whose gradient crosses at these two weights."""
    weights = [LOWEST ** (k / sizes.readings) for k in range(1, sizes.readings + 1)]
    down = [(w, LOW if w <= collapse else HIGH) for w in weights]
    up = [(w, HIGH if w >= recovery else LOW) for w in [*reversed(weights), 1.0]]
    return path(
        {"before": [(1.0, HIGH)], "down": down, "bottom": [(LOWEST, LOW if collapse >= LOWEST else HIGH)], "up": up},
        ramp,
        seed=seed,
    )


def at_the_bottom(recovery: float, ramp: int = 80, seed: int = 0) -> pl.DataFrame:
    """A trajectory that collapses only while the weight is held at its lowest."""
    low = (pl.col("phase") == "down") | (pl.col("weight") >= recovery)
    return loop(LOWEST * 1.01, recovery, ramp, seed=seed).with_columns(
        gradient=pl.when(low).then(HIGH).otherwise(pl.col("gradient"))
    )


def test_turning_points_are_where_the_gradient_crosses() -> None:
    down = [(0.5, HIGH), (0.1, LOW), (0.05, LOW)]
    found = turning_points(path({"down": down, "up": [(0.05, LOW), (0.3, LOW), (0.6, HIGH), (1.0, HIGH)]}))
    assert found[:2] == (0.1, 0.6)
    stays, never = (turning_points(path({"down": down, "up": [(1.0, LOW)]})), turning_points(path({"down": down[:1]})))
    assert stays[0] == 0.1 and math.isnan(stays[1]) and all(map(math.isnan, never[:2]))


def test_one_dip_is_neither_collapse_nor_recovery() -> None:
    dip = {"down": [(0.5, LOW), (0.1, HIGH), (0.05, LOW)], "bottom": [(0.05, LOW)],
           "up": [(0.06, HIGH), (0.3, LOW), (0.6, HIGH)]}  # fmt: skip
    assert turning_points(path(dip))[:2] == (0.05, 0.6)
    assert math.isnan(turning_points(path({"down": [(0.1, LOW)], "bottom": [(0.05, HIGH)]}))[0])


def test_readings_that_are_missing_are_neither_above_nor_below() -> None:
    nan = math.nan
    assert math.isnan(turning_points(path({"down": [(0.1, LOW), (0.05, nan)]}))[0])
    assert math.isnan(turning_points(path({"down": [(0.1, LOW)], "up": [(0.5, HIGH), (1.0, nan)]}))[1])
    between = path({"down": [(0.5, HIGH), (0.1, LOW), (0.05, nan), (0.04, LOW)], "up": [(0.5, HIGH), (1.0, HIGH)]})
    assert turning_points(between)[:2] == (0.1, 0.5)
    beside = path({"down": [(0.5, HIGH), (0.1, nan), (0.05, LOW)], "up": [(0.1, LOW), (0.5, nan), (1.0, HIGH)]})
    assert turning_points(beside)[:2] == (0.05, 1.0)


def test_tokens_turn_by_their_own_threshold() -> None:
    table = path({"down": [(0.5, HIGH), (0.1, HIGH)], "up": [(0.5, HIGH)]})
    table = table.with_columns(residual=pl.Series([EQUAL + 1, EQUAL - 1, EQUAL + 1]))
    assert turning_points(table, "residual")[:2] == (0.1, 0.5) and math.isnan(turning_points(table)[0])


def test_loss_turns_near_a_guess() -> None:
    table = path({"down": [(0.5, HIGH), (0.1, HIGH)], "up": [(0.5, HIGH), (1.0, HIGH)]})
    losses = [3.0 - LEARNT - 0.01, 3.0 - LEARNT + 0.01, 3.1, 3.0 - LEARNT - 0.01]
    assert turning_points(table.with_columns(loss=pl.Series(losses)), "loss")[:2] == (0.1, 1.0)
    assert all(map(math.isnan, turning_points(table, "loss")[:2]))  # 2.0 throughout


def test_what_turns_while_the_weight_is_held_is_told_from_what_turns_on_the_ramp() -> None:
    before = {"before": [(1.0, HIGH)]}
    ramp = path({**before, "down": [(0.5, HIGH), (LOWEST, LOW)], "bottom": [(LOWEST, LOW)], "up": [(1.0, HIGH)]})
    held = path({**before, "down": [(0.5, HIGH), (LOWEST, HIGH)], "bottom": [(LOWEST, LOW)], "up": [(1.0, LOW)],
                 "after": [(1.0, HIGH)]})  # fmt: skip
    assert turning_points(ramp) == (LOWEST, 1.0, False, False) and turning_points(held) == (LOWEST, 1.0, True, True)
    cells = [QUESTION.answer({"trajectories": table}, FINE).evidence[0].rows[0][4] for table in (ramp, held)]
    assert cells[0] == "0.005 → 1.000 (200.0)" and cells[1] == "0.005† → 1.000† (200.0)"
    rising = path({**before, "down": [(0.5, HIGH)], "up": [(0.6, LOW), (1.0, HIGH)]})
    rows = [QUESTION.answer({"trajectories": table}, FINE).evidence[0].rows[0] for table in (rising, loop(0.001, 0.5))]
    assert rows[0][4] == "only rising" and rows[0][3] == rows[1][3] == "–"


def test_networks_that_diverged_are_left_out_and_said() -> None:
    one, other = loop(0.025, 0.5), loop(0.025, 0.5, seed=1).with_columns(loss=pl.lit(math.inf))
    table = pl.concat([one, other])
    assert points_of(table)["seed"].unique().to_list() == [0]
    assert "1 networks diverged and are left out" in QUESTION.answer({"trajectories": table}, FINE).notes[0]


def test_networks_that_had_learnt_nothing_are_not_judged() -> None:
    blind, learnt = loop(0.025, 0.9).with_columns(loss=pl.lit(2.95)), loop(0.025, 0.9, seed=1)
    assert points_of(pl.concat([blind, learnt]))["seed"].unique().to_list() == [1]
    answer = QUESTION.answer({"trajectories": blind}, FINE)
    assert [verdict.holds for verdict in answer.verdicts] == [None] * 5 and "no network had learnt" in answer.sentence
    late = learnt.with_columns(loss=pl.when(pl.col("phase") == "before").then(2.95).otherwise("loss"))
    assert not points_of(late).height and "0 of 1 had learnt" in QUESTION.answer({"trajectories": late}, FINE).notes[0]


@pytest.mark.slow
def test_a_trajectory_has_the_weights_it_says() -> None:
    """Skips of the network that is trained are those of the schedule, and what is read is of that network."""
    rows, plan = list(trajectory(2, 0, 8, SIZES)), SkipSchedule(4, 8)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 8, 12, 16, 20, 23, 24, 25, 26]
    assert [row["weight"] for row in rows] == [plan.weight(int(row["step"]) - 1)[1] for row in rows]
    assert all(float(row["residual"]) < 0.5 and math.isfinite(float(row["gradient"])) for row in rows)
    assert rows[5]["gradient"] != rows[0]["gradient"]


@pytest.mark.slow  # trains, and draws
def test_the_study_is_answered_and_resumed(tmp_path: Path) -> None:
    result = QUESTION.run(Setup(tmp_path), SIZES)
    assert result.tables["trajectories"].height == 12 + 13
    assert len(result.comparisons) == len(QUESTION.hypotheses) and len(result.figures["hysteresis"].axes) == 6
    assert QUESTION.run(Setup(tmp_path), SIZES).tables["trajectories"].equals(result.tables["trajectories"])


def held(*tables: pl.DataFrame) -> list[bool | None]:
    return [verdict.holds for verdict in QUESTION.answer({"trajectories": pl.concat(tables)}, FINE).verdicts]


def test_collapse_is_judged_by_its_weight() -> None:
    assert held(loop(0.025, 0.9))[0] is True
    assert held(loop(0.025, 0.9), loop(0.1, 0.9, 160))[0] is False  # too early
    assert held(loop(0.008, 0.9))[0] is False  # too late
    assert held(loop(0.025, 0.9), loop(0.001, 0.9, 160))[0] is False  # one does not collapse
    assert held(loop(0.0199, 0.9))[0] is True  # is read at 0.0188: the reading before, at 0.0215, was above


def test_recovery_is_judged_by_the_ratio_of_crossings() -> None:
    assert held(loop(0.025, 0.9))[1] is True and held(loop(0.025, 2.0))[1] is True  # 36 times; not at all
    assert held(loop(0.025, 0.1))[1] is False and held(loop(0.025, 0.9), loop(0.025, 0.03, 160))[1] is False
    assert held(loop(0.025, 12.5 * 0.025))[1] is None  # between readings, the ratio may be less than twelve
    assert held(loop(0.3, 1.0))[1] is None  # back at full weight only: how much more it needs is not seen
    assert held(loop(0.001, 0.9))[1] is None  # no collapse
    assert held(at_the_bottom(0.03))[1] is None  # six times the lowest weight: further down it might be twelve
    assert held(at_the_bottom(0.9))[1] is True and held(loop(LOWEST * 1.01, 0.03))[1] is False


def test_tokens_are_judged_by_themselves() -> None:
    gone = loop(0.025, 0.9)
    tokens = gone.with_columns(residual=pl.col("gradient") - COLLAPSED + EQUAL)
    assert held(gone)[2:4] == [False, None] and held(tokens)[2:4] == [True, True]
    early = loop(0.3, 0.4).with_columns(residual=pl.col("gradient") - COLLAPSED + EQUAL)
    assert held(early)[2:4] == [False, False]


def test_a_lag_in_time_is_told_from_one_in_the_weight() -> None:
    short, same = loop(0.025, 0.5), loop(0.025, 0.5, 160)
    half = loop(0.025, 0.025 * math.sqrt(0.5 / 0.025), 160)
    assert held(short, same)[4] is True and held(short, half)[4] is False
    assert held(loop(0.025, 0.026), loop(0.025, 0.026, 160))[4] is None  # no lag
    assert held(short)[4] is None and held(short, loop(0.025, 2.0, 160))[4] is None
    ends = held(at_the_bottom(0.5), at_the_bottom(0.03, 160)), held(loop(0.025, 1.0), loop(0.5, 1.0, 160))
    assert [verdicts[4] for verdicts in ends] == [None, None]  # the ends of the ramp decided one weight of each


def forgetting(table: pl.DataFrame, relearnt: float) -> pl.DataFrame:
    """A trajectory of which tokens turn with the gradient, and whose loss is that of a guess from there to a weight."""
    rising = pl.col("phase").is_in(PHASES[3:])
    lost = (pl.col("gradient") == LOW) & ~rising | rising & (pl.col("weight") < relearnt)
    return table.with_columns(
        residual=pl.col("gradient") - COLLAPSED + EQUAL, loss=pl.when(lost).then(3.0).otherwise(pl.col("loss"))
    )


@pytest.mark.parametrize(
    ("collapse", "recovery", "relearnt", "words"),
    [
        (0.001, 0.5, 0.0, "No network collapses, and none forgets"),
        (0.025, 2.0, 2.0, "No. 2 layers: 1 of 1 collapse by tokens, at weight 0.025, none recover; 1 forget, none"),
        (0.025, 0.5, 2.0, "Some do. "),
        (0.025, 0.5, 0.8, "Yes, in tokens and loss. "),
    ],
)
def test_the_sentence_says_who_recovers(collapse: float, recovery: float, relearnt: float, words: str) -> None:
    table = forgetting(loop(collapse, recovery), relearnt)
    sentence = QUESTION.answer({"trajectories": table}, FINE).sentence
    assert sentence.startswith(words)
    assert ("all learn again, at weight" in sentence) == words.startswith("Yes")


def test_depths_are_reported_apart() -> None:
    deep = forgetting(loop(0.3, 0.6), 0.8).with_columns(layers=4)
    found = QUESTION.answer({"trajectories": pl.concat([loop(0.001, 0.5), deep], how="diagonal_relaxed")}, FINE)
    assert "4 layers: 1 of 1 collapse by tokens" in found.sentence
    assert "2 layers: none of 1 collapse." in found.sentence
    lowest = forgetting(loop(LOWEST * 1.01, 0.6), 0.8)
    assert "at the lowest weight, 0.005, all recover" in QUESTION.answer({"trajectories": lowest}, FINE).sentence
    assert "2 layers: none of 1 collapse; 4 layers: 1 of 1 collapse, at a weight of 0.2" in found.verdicts[2].ours


def test_the_figure_has_a_row_for_each_ramp_and_marks_thresholds() -> None:
    table = pl.concat([loop(0.025, 0.5), loop(0.025, 0.5, 160)])
    axes = QUESTION.draw({"trajectories": table}, FINE)["hysteresis"].axes
    assert len(axes) == 6
    levels = [
        [np.asarray(line.get_ydata()).item(0) for line in panel.lines if line.get_linestyle() == ":"] for panel in axes
    ]
    assert levels == [[pytest.approx(3.0 - LEARNT)], [EQUAL], [COLLAPSED]] * 2

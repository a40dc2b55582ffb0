"""Long paths: what is trained and read, and that the answer follows the tables."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch.nn import functional as F

from rankscope.errors import StudyError
from rankscope.lab import Batch
from rankscope.lab.path_model import PathModel
from rankscope.studies.questions import long_paths as study
from rankscope.studies.questions import path_networks
from rankscope.studies.questions.long_paths import FULL, MARKS, QUESTION, QUICK, ROWS, SHAPED, Arm, LengthSizes
from rankscope.studies.study import Setup
from tests.builders import normal

TINY = LengthSizes(
    ("hull",), layers=1, seeds=2, widths=(6,), heads=(2,), steps=(2,), batches=(4,), rates=(1e-3,), context=8,
    samples=32, remedies=(SHAPED,), factors=(), evaluation_samples=4, head_samples=8, probe_samples=2,
)  # fmt: skip
SEEDS = (0, 1)


def test_a_tiny_study_is_answered_resumed_and_drawn(tmp_path: Path) -> None:
    said: list[str] = []
    first = QUESTION.run(Setup(tmp_path, say=said.append), TINY)
    again = QUESTION.run(Setup(tmp_path, say=said.append), TINY)
    assert len(said) == len(study.arms("hull", TINY)) == 8
    table = first.tables["paths"]
    assert table.equals(again.tables["paths"]) and first.summary == again.summary
    assert first.figures[QUESTION.name].axes and len(first.page_tables) == 2
    for mark in MARKS:  # shares of the output of whole networks add up to one
        found = table.filter(kind="all", condition="plain", quantity=f"share {mark:g}")
        assert found.group_by("seed").agg(pl.col("value").sum())["value"].to_list() == pytest.approx([1, 1])
    bare = table.filter(condition="no skips", quantity="residual").sort("at", "seed")["value"]
    assert bare[:2].is_nan().all() and bare[2:].is_finite().all()  # without skips there is no path of length 0


@pytest.mark.slow  # trains every arm of every task
def test_every_task_and_arm_trains(tmp_path: Path) -> None:
    sizes = replace(
        TINY, tasks=QUESTION.full.tasks, layers=2, widths=(8,) * 3, heads=(2,) * 3, steps=(2,) * 3, batches=(4,) * 3,
        rates=(1e-3,) * 3, remedies=FULL.remedies, factors=FULL.factors,
    )  # fmt: skip
    result = QUESTION.run(Setup(tmp_path), sizes)
    assert {*result.tables["paths"]["task"]} == {"sort", "hull", "text"}
    assert result.tables["paths"].filter(quantity="loss")["value"].is_finite().all()


def test_arms_are_of_the_lengths_that_they_name() -> None:
    assert Arm().weights(3) == (1, 1, 1, 1) and Arm("exact", 2).weights(3) == (0, 0, 1, 0)
    assert Arm("most", 1).weights(3) == (1, 1, 0, 0) and Arm("least", 1).weights(3) == (0, 1, 1, 1)
    assert Arm("exact", 3, SHAPED, skips=False).condition == "no skips shaped" and Arm().condition == "plain"
    with pytest.raises(StudyError, match="kind"):
        Arm("few").weights(3)
    with pytest.raises(StudyError, match="task"):
        path_networks.path_task("chess", 8, 8)
    for sizes in (QUICK, FULL):
        for task in sizes.tasks:
            weights = [(arm.weights(sizes.layers), arm.condition) for arm in study.arms(task, sizes)]
            assert len({*weights}) == len(weights)  # nothing is trained twice


def test_sorting_is_of_the_papers_size() -> None:
    training = study.training_of("sort", Arm("exact", 6), replace(FULL, seeds=1))
    model, arch = training.models[0], training.models[0].net.arch
    assert isinstance(model, PathModel) and model.lengths.tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert (arch.layers, arch.width, arch.heads, arch.mlp, arch.norm_place) == (6, 48, 2, "none", "post")
    assert len(training.task.batch(2000, 0, 0)) == 1000 and training.recipe.steps * training.recipe.batch == 60 * 1000


def test_a_new_head_is_the_best_linear_one() -> None:
    """No other head has less of the penalised loss: its gradient is zero, and the loss is convex."""
    Y, labels = normal(20, 6, 5, seed=1), torch.arange(120).reshape(20, 6) % 3
    W = path_networks.fitted_head(Y, Batch(torch.zeros(20), labels), 3).requires_grad_()
    scores = path_networks.with_ones(Y) @ W
    loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten()) + path_networks.HEAD_PENALTY * W.square().sum()
    (gradient,) = torch.autograd.grad(loss, W)
    assert W.shape == (6, 3) and float(gradient.detach().norm()) < 1e-5 * float(W.detach().norm() + 1)


def tables(
    alone: float | tuple[float, float] = 0.9, headed: float = 0.2, own: float = 0.1, shaped: float = 0.95,
    bare: float = 0.3, share: float = 0.05, whole: float = 0.95, mended: float = 0.8,
) -> dict[str, pl.DataFrame]:  # fmt: skip
    """Made-up tables of the quick study: accuracies of the longest paths, the network by tokens having 0.2."""
    last, rows = QUICK.layers, []

    def put(arm: Arm, quantity: str, value: float | tuple[float, float], at: int | None = None) -> None:
        for seed in SEEDS:
            labels = ("sort", arm.kind, arm.length, arm.condition, seed, quantity, at)
            rows.append((*labels, value[seed] if isinstance(value, tuple) else value + 0.01 * seed))

    put(Arm(), "accuracy", whole)
    for k in range(last + 1):
        put(Arm("exact", k), "accuracy", 0.2 if k == 0 else alone)
        put(Arm(), "own head", 0.5 if k == 1 else own, k)
        put(Arm(), "new head", headed, k)
        for mark in MARKS:
            put(Arm(), f"share {mark:g}", share / 2 if k >= QUICK.long else 0.4, k)
    put(Arm("exact", last, SHAPED), "accuracy", shaped)
    put(Arm("exact", last, skips=False), "accuracy", bare)
    put(Arm("exact", last, SHAPED, skips=False), "accuracy", mended)
    return {"paths": pl.DataFrame(rows, schema=ROWS, orient="row")}


def test_the_sentence_turns_with_the_numbers() -> None:
    trained, born, head = (QUESTION.answer(tables(*numbers), QUICK) for numbers in ((0.9,), (0.3,), (0.9, 0.8)))
    assert trained.sentence.startswith("By training: ") and "93%" in trained.sentence  # (0.9 - 0.2) / (0.95 - 0.2)
    assert born.sentence.startswith("By nature: ") and "13%" in born.sentence
    assert head.sentence.startswith("By neither: ") and "80%" in head.sentence
    assert "without skips they recover 13%, with shaped attention 80%" in trained.sentence
    blind = QUESTION.answer(tables(whole=0.22), QUICK)
    assert blind.sentence.startswith("It cannot be told") and [v.holds for v in blind.verdicts[:3]] == [None] * 3
    assert all(len(found.sentence.split()) <= 60 for found in (trained, born, head))


def test_hypotheses_are_judged_by_the_tables() -> None:
    def holds(place: int, **numbers: Any) -> bool | None:
        return QUESTION.answer(tables(**numbers), QUICK).verdicts[place].holds

    assert [verdict.holds for verdict in QUESTION.answer(tables(), QUICK).verdicts] == [True] * 6 + [None]
    assert holds(0, own=0.4) is False
    assert holds(1, headed=0.7) is False and holds(2, alone=0.4) is False
    assert holds(2, alone=(0.5, 0.7)) is None  # one seed on either side of a half
    assert holds(3, shaped=0.8) is False and holds(3, shaped=0.905) is None
    assert holds(4, share=0.3) is False and holds(5, bare=0.93) is False
    empty = {"paths": pl.DataFrame(schema=ROWS)}
    assert [verdict.holds for verdict in QUESTION.answer(empty, QUICK).verdicts] == [None] * 7
    other = replace(QUICK, steps=(201,))  # not the run on whose data the last one was made
    assert QUESTION.answer(tables(), other).verdicts[6].holds is True
    assert QUESTION.answer(tables(mended=0.2), other).verdicts[6].holds is False


@pytest.mark.parametrize(
    ("cases", "expected"),
    [
        ({"a": [True, True], "b": [True]}, True),
        ({"a": [True, True], "b": [False, False]}, False),
        ({"a": [True, False], "b": [True]}, None),
        ({"a": [], "b": [True]}, None),
        ({}, None),
    ],
)
def test_a_hypothesis_on_every_task_needs_every_seed(cases: dict[str, list[bool]], expected: bool | None) -> None:
    assert study.judged(cases) is expected

"""Tasks on samples that are drawn once: labels and ceilings, each against another way to find them."""

from itertools import combinations

import numpy as np
import pytest
import torch

from rankscope.errors import LabError
from rankscope.lab import UNLABELLED
from rankscope_studies.dong2021.tasks import Hull, Memorization, Sort, ceiling, on_hull, prose
from tests.raising import raises


def corners(points: np.ndarray) -> list[bool]:
    """On the hull: inside no triangle of other points. O(n^4) and nothing like what is tested."""

    def side(a: np.ndarray, b: np.ndarray, p: np.ndarray) -> float:
        return float((b[0] - a[0]) * (p[1] - a[1]) - (b[1] - a[1]) * (p[0] - a[0]))

    def inside(p: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> bool:
        return len({side(a, b, p) > 0, side(b, c, p) > 0, side(c, a, p) > 0}) == 1

    return [
        not any(inside(p, *triangle) for triangle in combinations(np.delete(points, at, 0), 3))
        for at, p in enumerate(points)
    ]


def test_sorted_symbols_are_the_labels() -> None:
    train, test = Sort().data
    assert (len(train), len(test)) == (1000, 200)
    assert test.inputs.shape == (200, 8)
    assert set(train.inputs.flatten().tolist()) == set(range(10))
    for data in (train, test):
        assert data.labels.tolist() == [sorted(row) for row in data.inputs.tolist()]


def test_points_on_the_hull_are_in_no_triangle() -> None:
    train, _ = Hull(train=30, test=5).data
    for points, labels in zip(train.inputs, train.labels, strict=True):
        assert corners(points.double().numpy()) == labels.bool().tolist()
    assert on_hull(np.array([[0.0, 0], [1, 0], [0, 1], [0.3, 0.3]])).tolist() == [True, True, True, False]


@pytest.mark.slow
def test_the_majority_of_points_is_on_the_hull() -> None:
    """The mean number of corners among 10 uniform points is 5.96."""
    task = Hull(train=4000, test=2000)
    assert task.baselines["majority"] == pytest.approx(0.596, abs=0.01)
    assert float(task.data[1].labels.double().mean()) == task.baselines["majority"]


def best(labelled: list[tuple[str, int]]) -> int:
    """How many of these words one can label rightly that gives each word one label."""
    words = {word for word, _ in labelled}
    return sum(max(labelled.count((word, label)) for label in (0, 1)) for word in words)


def test_memorization_has_a_random_label_per_word_and_known_ceilings() -> None:
    task = Memorization(texts=12, longest=30)
    data, test = task.data
    assert test is data
    assert data.inputs.shape == (12, 30)
    words, valid = prose(12, 30), data.labels != UNLABELLED
    assert valid.sum(1).tolist() == [len(text) for text in words]
    symbols = len(set(data.inputs[valid].tolist()))
    assert symbols == task.interface.symbols == len({word for text in words for word in text})

    labelled = [list(zip(*each, strict=False)) for each in zip(words, data.labels.tolist(), strict=True)]
    whole = [pair for text in labelled for pair in text]
    together = sum(map(best, labelled)) / len(whole)
    assert task.baselines["ceiling"] == together
    assert task.baselines["context-free ceiling"] == best(whole) / len(whole)
    assert 0.5 <= task.baselines["majority"] < task.baselines["context-free ceiling"] < together < 1
    with raises(LabError, subject="texts"):
        prose(10**6, 30)


def test_a_ceiling_is_the_share_of_the_commonest_label_of_what_is_seen() -> None:
    assert ceiling("aab", [0, 1, 1]) == 2 / 3
    assert ceiling("abc", [0, 1, 1]) == 1


def test_every_draw_is_the_seeds() -> None:
    for make in (Sort, Hull):
        first, again, other = (make(20, 5, seed).data[0].inputs for seed in (0, 0, 1))
        assert torch.equal(first, again) and not torch.equal(first, other)


def test_a_pass_goes_through_all_samples_once() -> None:
    sort = Sort(30, 10)
    seen = torch.cat([sort.batch(8, 1, step).inputs for step in range(4)])
    assert sorted(seen.tolist()) == sorted(sort.data[0].inputs.tolist())
    assert len(sort.batch(8, 1, 3)) == 6

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

from rankscope.metrics import mean_abs_cosine, mean_cosine, min_cosine
from tests.strategies import matrices


@given(matrices(rows=(2, 6)))
def test_cosines_are_their_definition(X: Tensor) -> None:
    def cosine(a: np.ndarray, b: np.ndarray) -> float:
        size = np.linalg.norm(a) * np.linalg.norm(b)
        return float(a @ b / size) if size else 0.0

    found = [cosine(a, b) for a, b in itertools.combinations(X.numpy(), 2)]
    assert mean_cosine(X).item() == pytest.approx(np.mean(found), abs=1e-12)
    assert mean_abs_cosine(X).item() == pytest.approx(np.mean(np.abs(found)), abs=1e-12)
    assert min_cosine(X).item() == pytest.approx(np.min(found), abs=1e-12)


def test_parallel_opposite_and_orthogonal() -> None:
    X = torch.tensor([[1.0, 0.0], [-2.0, 0.0], [0.0, 5.0]])
    assert mean_cosine(X).item() == pytest.approx(-1 / 3)
    assert mean_abs_cosine(X).item() == pytest.approx(1 / 3)
    assert min_cosine(X).item() == -1


def test_one_token_agrees_with_itself_and_a_zero_token_with_none() -> None:
    for metric in (mean_cosine, mean_abs_cosine, min_cosine):
        assert metric(torch.randn(1, 4)) == 1
        assert metric(torch.zeros(3, 4)) == 0

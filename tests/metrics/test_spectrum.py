import math

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

from rankscope.deviation import DeviationStep, State
from rankscope.deviation.readings import read
from rankscope.metrics import (
    METRICS,
    affine_rank,
    effective_rank,
    numerical_rank,
    participation_ratio,
    sigma_min,
    singular_values,
    stable_rank,
)
from tests.strategies import matrices


def with_singular_values(values: list[float], n: int = 7, d: int = 6) -> Tensor:
    U, _ = torch.linalg.qr(torch.randn(n, len(values), dtype=torch.float64))
    V, _ = torch.linalg.qr(torch.randn(d, len(values), dtype=torch.float64))
    return U @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ V.T


def test_every_rank_of_a_matrix_with_known_singular_values() -> None:
    X = with_singular_values([4.0, 2.0, 1.0])
    assert singular_values(X)[:3].tolist() == pytest.approx([4, 2, 1])
    assert numerical_rank(X) == 3
    assert stable_rank(X).item() == pytest.approx(21 / 16)
    assert participation_ratio(X).item() == pytest.approx(21**2 / (256 + 16 + 1))
    p = np.array([4, 2, 1]) / 7
    assert effective_rank(X).item() == pytest.approx(math.exp(-(p * np.log(p)).sum()))
    assert sigma_min(X).item() == pytest.approx(0, abs=1e-14)
    assert sigma_min(with_singular_values([4.0, 2.0, 1.0], n=3)).item() == pytest.approx(1)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_k_equal_singular_values_have_rank_k_by_every_meaning(k: int) -> None:
    X = with_singular_values([3.0] * k)
    for rank in (numerical_rank, stable_rank, effective_rank, participation_ratio):
        assert rank(X).item() == pytest.approx(k)


@given(matrices())
def test_ranks_are_in_order(X: Tensor) -> None:
    """stable <= participation <= effective <= numerical rank, up to rounding, unless X is zero."""
    if not X.abs().max():
        return
    stable, participation, effective = (f(X).item() for f in (stable_rank, participation_ratio, effective_rank))
    assert 1 - 1e-9 <= stable <= participation * (1 + 1e-9)
    assert participation <= effective * (1 + 1e-9)
    assert effective <= min(X.shape) + 1e-9
    assert affine_rank(X) <= numerical_rank(X) <= affine_rank(X) + 1


@given(matrices())
def test_numerical_rank_is_numpys(X: Tensor) -> None:
    assert numerical_rank(X).item() == np.linalg.matrix_rank(X.numpy())


def test_affine_rank_of_points_on_a_line_and_in_a_plane() -> None:
    t = torch.randn(9, 1, dtype=torch.float64)
    offset, direction = torch.randn(1, 5, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    line = offset + t * direction[:1]
    plane = line + torch.randn(9, 1, dtype=torch.float64) * direction[1:]
    assert affine_rank(line) == 1 and numerical_rank(line) == 2
    assert affine_rank(plane) == 2 and numerical_rank(plane) == 3


def test_rank_follows_the_arithmetic_that_made_the_tokens() -> None:
    X = with_singular_values([1.0, 1e-5, 1e-10])
    assert numerical_rank(X) == 3
    assert numerical_rank(X.float()) == 2
    assert numerical_rank(X, unit=torch.finfo(torch.bfloat16).eps) == 1


def test_ranks_do_not_underflow() -> None:
    X = with_singular_values([3.0, 3.0]) * 1e-200
    for rank in (numerical_rank, stable_rank, effective_rank, participation_ratio):
        assert rank(X).item() == pytest.approx(2)


def test_n_tokens_differ_in_n_minus_one_directions_however_they_are_rounded() -> None:
    for seed in range(40):
        X = 10.0 ** (seed % 9) * torch.randn(2, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        assert affine_rank(X[None], unit=1e-30).item() == 1
        reading = read(METRICS["affine_rank"], DeviationStep(0, State.of(X[None], torch.ones(1, 2).bool()), None))
        assert reading is not None and not reading.below_floor.any()

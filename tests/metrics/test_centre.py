"""The argmin centre against grids, random and local searches, and the bound on the mean."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rankscope.metrics import residual
from rankscope.metrics.residuals import minimiser
from tests.metrics.test_residuals import slow_composite
from tests.strategies import matrices


@given(matrices(rows=(1, 6), columns=(1, 5)))
def test_argmin_is_least_and_the_mean_is_near(X: Tensor) -> None:
    n = len(X)
    least, mean, midrange = (residual(X, centre=c).item() for c in ("argmin", "mean", "midrange"))
    rounding = 1e-9 * float(X.abs().max())
    assert least <= min(mean, midrange) + rounding
    assert mean <= 2 * (1 - 1 / n) * least + rounding


def test_the_mean_can_come_near_its_bound() -> None:
    """2(1 - 1/n) is not idle: here the mean is 1.76 times the argmin, of 1.8 allowed at n = 10."""
    X = torch.zeros(10, 401, dtype=torch.float64)
    X[0, 0], X[1, 1:] = 1.0, 0.05
    assert 1.75 < (residual(X) / residual(X, centre="argmin")).item() <= 1.8


def test_argmin_where_two_programmes_meet_in_one_point() -> None:
    column = [1.2688152738912304, 0.5730659923355066, 2.3835922292341163, 0.20497859792723128,
              0.8214789160702182, -0.7384139812679597]  # fmt: skip
    X = torch.tensor(column, dtype=torch.float64)[:, None]
    grid = np.linspace(-1, 2.5, 70001)
    distances = np.abs(X.numpy() - grid)
    best = math.sqrt((distances.sum(0) * distances.max(0)).min())
    assert residual(X, centre="argmin").item() == pytest.approx(best, rel=1e-4)


@given(st.integers(0, 10**6))
def test_argmin_is_never_above_mean_or_midrange_however_close_the_tokens(seed: int) -> None:
    X = 1.0 + 1e-12 * torch.randn(4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    least = residual(X, centre="argmin")
    assert least <= residual(X) and least <= residual(X, centre="midrange")


@given(matrices(rows=(2, 6), columns=(1, 1)))
def test_argmin_in_one_dimension_matches_a_fine_grid(X: Tensor) -> None:
    points = X[:, 0].numpy()
    grid = np.linspace(points.min(), points.max(), 20001)
    distances = np.abs(points[:, None] - grid)
    best = math.sqrt((distances.sum(0) * distances.max(0)).min())
    least = residual(X, centre="argmin").item()
    assert least <= best * (1 + 2e-5) + 1e-12
    assert least >= best * (1 - 1e-3) - 1e-12


@given(matrices(rows=(2, 5), columns=(2, 4)), st.integers(0, 999))
def test_no_random_or_local_search_beats_the_argmin(X: Tensor, seed: int) -> None:
    from scipy.optimize import minimize

    A, random = X.numpy(), np.random.default_rng(seed)
    least = residual(X, centre="argmin").item()
    scale = float(np.abs(A - A.mean(0)).max())
    for _ in range(3):
        start = A[random.integers(len(A))] + scale * random.normal(size=A.shape[1])
        rival = minimize(lambda x: slow_composite(A - x), start, method="Nelder-Mead", options={"maxiter": 400})
        assert least <= rival.fun * (1 + 2e-5) + 1e-9 * scale


def test_argmin_finds_the_global_minimum_among_several_local_ones() -> None:
    """f g along the Pareto front has several local minima here; enumerate the kinks of a fine 2-d grid."""
    random = np.random.default_rng(7)
    for _ in range(4):
        X = random.integers(-3, 4, size=(5, 2)).astype(float)
        axis = [np.unique(np.concatenate([X[:, j], np.linspace(-3, 3, 121)])) for j in range(2)]
        best = min(slow_composite(X - np.array(x)) for x in itertools.product(*axis))
        least = slow_composite(X - minimiser(X))
        assert least <= best * (1 + 2e-5)
        assert least >= best * 0.98

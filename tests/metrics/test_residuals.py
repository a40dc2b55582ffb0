import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rankscope.metrics import (
    composite_norm,
    high_frequency_share,
    max_residual,
    mu,
    relative_mu,
    relative_residual,
    residual,
    spectral_residual,
)
from rankscope.metrics.argmin import minimiser
from tests.strategies import matrices


def slow_composite(A: np.ndarray) -> float:
    """The definition, entry by entry."""
    n, d = A.shape
    columns = [sum(abs(A[i, j]) for i in range(n)) for j in range(d)]
    rows = [sum(abs(A[i, j]) for j in range(d)) for i in range(n)]
    return math.sqrt(max(columns) * max(rows))


def test_the_composite_measure_breaks_the_triangle_inequality() -> None:
    A = torch.zeros(5, 5, dtype=torch.float64)
    A[:, 0] = 1.0
    assert composite_norm(A).item() == pytest.approx(math.sqrt(5))
    assert composite_norm(A.T).item() == pytest.approx(math.sqrt(5))
    assert composite_norm(A + A.T).item() == pytest.approx(6)
    assert composite_norm(A + A.T) > composite_norm(A) + composite_norm(A.T)


@given(matrices())
def test_composite_norm_is_its_definition(X: Tensor) -> None:
    assert composite_norm(X).item() == pytest.approx(slow_composite(X.numpy()), rel=1e-12)


@given(matrices(), st.integers(0, 99))
def test_composite_norm_is_submultiplicative(A: Tensor, seed: int) -> None:
    B = torch.randn(A.shape[1], 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert composite_norm(A @ B) <= composite_norm(A) * composite_norm(B) * (1 + 1e-12)


@given(matrices())
def test_residual_about_the_mean_is_its_definition(X: Tensor) -> None:
    A = X.numpy() - np.mean(X.numpy(), axis=0)
    assert residual(X).item() == pytest.approx(slow_composite(A), rel=1e-9, abs=1e-9 * float(X.abs().max()))


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
    found = residual(X, centre="argmin").item()
    assert found <= best * (1 + 2e-5) + 1e-12
    assert found >= best * (1 - 1e-3) - 1e-12


@given(matrices(rows=(2, 5), columns=(2, 4)), st.integers(0, 999))
def test_no_random_or_local_search_beats_the_argmin(X: Tensor, seed: int) -> None:
    from scipy.optimize import minimize

    A, random = X.numpy(), np.random.default_rng(seed)
    found = residual(X, centre="argmin").item()
    scale = float(np.abs(A - A.mean(0)).max())
    for _ in range(3):
        start = A[random.integers(len(A))] + scale * random.normal(size=A.shape[1])
        rival = minimize(lambda x: slow_composite(A - x), start, method="Nelder-Mead", options={"maxiter": 400})
        assert found <= rival.fun * (1 + 2e-5) + 1e-9 * scale


def test_argmin_finds_the_global_minimum_among_several_local_ones() -> None:
    """f g along the Pareto front has several local minima here; enumerate the kinks of a fine 2-d grid."""
    random = np.random.default_rng(7)
    for _ in range(4):
        X = random.integers(-3, 4, size=(5, 2)).astype(float)
        axis = [np.unique(np.concatenate([X[:, j], np.linspace(-3, 3, 121)])) for j in range(2)]
        best = min(slow_composite(X - np.array(x)) for x in itertools.product(*axis))
        found = slow_composite(X - minimiser(X))
        assert found <= best * (1 + 2e-5)
        assert found >= best * 0.98


@pytest.mark.parametrize("measure", [mu, spectral_residual, max_residual])
@given(X=matrices(rows=(2, 6)), seed=st.integers(0, 999))
def test_closed_form_argmins_beat_any_other_centre(measure: object, X: Tensor, seed: int) -> None:
    norm = {
        mu: lambda A: np.linalg.norm(A),
        spectral_residual: lambda A: np.linalg.norm(A, 2),
        max_residual: lambda A: np.abs(A).max(),
    }[measure]  # type: ignore[index]
    random = np.random.default_rng(seed)
    A = X.numpy()
    least = measure(X, centre="argmin").item()  # type: ignore[operator]
    for centre in (A.mean(0), np.median(A, axis=0), A[0] + random.normal(size=A.shape[1])):
        assert least <= norm(A - centre) * (1 + 1e-9) + 1e-12


@given(matrices())
def test_mu_is_the_spread_of_pairs(X: Tensor) -> None:
    """`mu^2 = sum_{i<j} |x_i - x_j|^2 / n`."""
    pairs = sum(float((a - b).square().sum()) for a, b in itertools.combinations(X, 2))
    assert mu(X).item() == pytest.approx(math.sqrt(pairs / len(X)), rel=1e-6, abs=1e-9 * float(X.abs().max()))


@given(matrices(rows=(2, 8)))
def test_high_frequency_share_is_what_the_fourier_transform_says(X: Tensor) -> None:
    energy = np.abs(np.fft.fft(X.numpy(), axis=0)) ** 2
    share = energy[1:].sum() / energy.sum() if energy.sum() else 0.0
    assert high_frequency_share(X).item() == pytest.approx(share, abs=1e-12)


@given(matrices(rows=(2, 6)), st.floats(0.1, 10))
def test_residuals_ignore_a_common_shift_and_follow_the_scale(X: Tensor, scale: float) -> None:
    shift = torch.linspace(-1, 1, X.shape[1], dtype=torch.float64)
    size = float(X.abs().max()) + 1
    for measure in (residual, mu, spectral_residual, max_residual):
        assert measure(X + shift).item() == pytest.approx(measure(X).item(), rel=1e-6, abs=1e-12 * size)
        # Equal tokens have a residual of rounding errors, which do not follow the scale.
        scaled = pytest.approx(scale * measure(X).item(), rel=1e-9, abs=1e-12 * scale * size)
        assert measure(scale * X).item() == scaled
    assert relative_residual(scale * X).item() == pytest.approx(relative_residual(X).item(), rel=1e-9, abs=1e-12)


def test_relative_forms_divide_by_the_same_norm() -> None:
    X = torch.randn(5, 3, dtype=torch.float64)
    assert relative_residual(X) == residual(X) / composite_norm(X)
    assert relative_mu(X) == mu(X) / X.norm()

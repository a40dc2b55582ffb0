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

"""Collapse across samples: each number against its authors' formula, written out in numpy, and at both extremes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankscope.errors import MetricError, TokensError
from rankscope.metrics import alignment, alpha_req, distance_floor, lidar, rankme, rankme_floor, uniformity
from tests.metrics import sample_formulas
from tests.raising import raises

SIZES = st.tuples(st.integers(2, 40), st.integers(1, 30), st.integers(0, 10**6))


def drawn(samples: int, width: int, seed: int) -> Tensor:
    return torch.randn(samples, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(SIZES)
@settings(max_examples=40, deadline=None)
def test_rankme_is_that_of_the_paper_and_lies_between_one_and_the_rank(size: tuple[int, int, int]) -> None:
    Z = drawn(*size)
    assert float(rankme(Z)) == pytest.approx(sample_formulas.rankme(Z), rel=1e-9)
    assert 1 - 1e-4 <= float(rankme(Z)) <= min(size[:2]) * (1 + 1e-4)
    assert float(rankme(3 * Z)) == pytest.approx(float(rankme(Z)), rel=1e-9)


def test_equal_samples_of_any_dtype_are_below_the_floor_of_rankme() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        row = drawn(1, 64, 3)
        rounding = 1 + torch.finfo(dtype).eps / 2 * (2 * torch.rand(256, 64, dtype=torch.float64) - 1)
        found = float(rankme((row * rounding).to(dtype)))
        assert found <= rankme_floor(256, 64, dtype), dtype
        assert found < 1.9
    assert rankme_floor(256, 64) < 1.01
    assert rankme_floor(256, 64) < 0.1 * float(rankme(drawn(256, 64, 0).float()))


def test_alpha_is_the_slope_of_a_weighted_least_squares_fit() -> None:
    Z = drawn(200, 60, 1) * torch.arange(1, 61, dtype=torch.float64) ** -0.7
    assert float(alpha_req(Z)) == pytest.approx(sample_formulas.alpha_req(Z), rel=1e-9)
    exact = torch.diag(torch.arange(1, 31, dtype=torch.float64) ** -0.5)
    signs = torch.cat([exact, -exact])  # mean zero, eigenvalues k^-1
    assert float(alpha_req(signs, 1, 30)) == pytest.approx(1.0, rel=1e-9)


def test_alpha_has_no_value_where_directions_are_missing() -> None:
    assert math.isnan(float(alpha_req(torch.cat([drawn(100, 5, 0), torch.zeros(100, 25)], 1))))
    with raises(MetricError, subject="first"):
        alpha_req(drawn(8, 64, 0))


@given(st.integers(2, 12), st.integers(2, 5), st.integers(1, 10), st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_lidar_is_that_of_the_paper(samples: int, views: int, width: int, seed: int) -> None:
    Z = drawn(samples * views, width, seed).reshape(samples, views, width)
    assert float(lidar(Z)) == pytest.approx(sample_formulas.lidar(Z), rel=1e-6)


def test_lidar_counts_directions_that_tell_samples_apart_only() -> None:
    apart = torch.cat([10 * drawn(200, 3, 0), torch.zeros(200, 13)], 1)[:, None]
    noise = 0.1 * drawn(200 * 8, 16, 1).reshape(200, 8, 16)
    assert 2.5 < float(lidar(apart + noise)) < 3.1
    assert float(rankme((apart + noise).flatten(0, 1))) > float(lidar(apart + noise))
    assert math.isnan(float(lidar(torch.ones(4, 2, 3))))


@pytest.mark.parametrize("samples", [5, 300])  # both ways to compute distances
def test_uniformity_and_alignment_are_those_of_the_paper(samples: int) -> None:
    Z, other = drawn(samples, 8, 2), drawn(samples, 8, 3)
    assert float(uniformity(Z)) == pytest.approx(sample_formulas.uniformity(Z), rel=1e-9)
    assert float(alignment(Z, other)) == pytest.approx(sample_formulas.alignment(Z, other), rel=1e-12)
    assert float(alignment(Z, 2 * Z)) < 1e-30
    assert float(uniformity(Z[:1].expand(samples, -1))) == pytest.approx(0.0, abs=1e-12)
    assert float(uniformity(drawn(300, 256, 4))) == pytest.approx(
        -4.0, abs=0.1
    )  # |z - z'|^2 is near 2 in many dimensions


def test_batches_of_sets_are_taken_and_wrong_shapes_refused() -> None:
    Z = torch.stack([drawn(20, 6, k) for k in range(3)])
    for each in (rankme, uniformity):
        assert torch.allclose(each(Z), torch.stack([each(z) for z in Z]))
    views = Z.reshape(3, 5, 4, 6)
    assert torch.allclose(lidar(views), torch.stack([lidar(v) for v in views]))
    with raises(TokensError, subject="Z"):
        rankme(torch.ones(0, 3))


DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def rounded(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """One embedding again and again, each entry rounded otherwise, as an arithmetic of this dtype does."""
    generator = torch.Generator().manual_seed(5)
    noise = torch.finfo(dtype).eps / 2 * (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1)
    return drawn(1, shape[-1], 3)[0] * (1 + noise)


@pytest.mark.parametrize("dtype", DTYPES)
def test_samples_that_differ_by_rounding_alone_have_no_alpha_and_no_lidar(dtype: torch.dtype) -> None:
    Z, views = rounded((256, 64), dtype), rounded((256, 2, 64), dtype)
    assert math.isnan(float(alpha_req(Z.to(dtype)))) and math.isnan(float(lidar(views.to(dtype))))
    # In a wider dtype they look apart: whoever cast them says in which they were computed.
    assert math.isnan(float(alpha_req(Z, dtype=dtype))) and math.isnan(float(lidar(views, dtype=dtype)))
    if dtype != torch.float64:
        assert sample_formulas.lidar(views) > 10 and math.isfinite(float(lidar(views)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("samples", [40, 300])  # both ways to compute distances
def test_samples_that_differ_by_rounding_alone_are_below_the_floor_of_distances(
    dtype: torch.dtype, samples: int
) -> None:
    views = rounded((samples, 2, 64), dtype).to(dtype)
    assert abs(float(uniformity(views[:, 0]))) <= 2 * distance_floor(dtype)
    assert float(alignment(views[:, 0], views[:, 1])) <= distance_floor(dtype)
    apart = drawn(samples, 64, 8).to(dtype)
    assert abs(float(uniformity(apart))) > 100 * 2 * distance_floor(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.0])
def test_a_spectrum_that_falls_by_a_power_is_told_from_rounding(alpha: float, dtype: torch.dtype) -> None:
    Z = drawn(400, 60, 1) * torch.arange(1, 61, dtype=torch.float64) ** (-alpha / 2) + 1.0
    assert float(alpha_req(Z.to(dtype))) == pytest.approx(sample_formulas.alpha_req(Z), abs=1e-3)
    views = Z[:, None] + 0.01 * drawn(800, 60, 2).reshape(400, 2, 60)
    assert float(lidar(views.to(dtype))) == pytest.approx(sample_formulas.lidar(views), rel=1e-2)


def test_embeddings_of_zero_are_collapsed_and_such_as_are_no_numbers_are_refused() -> None:
    zero = torch.zeros(50, 20)
    assert float(rankme(zero)) == pytest.approx(1.0, abs=1e-3) and float(uniformity(zero)) == pytest.approx(0, abs=1e-9)
    assert math.isnan(float(alpha_req(zero))) and math.isnan(float(lidar(zero.reshape(25, 2, 20))))
    for bad in (torch.nan, torch.inf):
        with raises(TokensError, subject="Z"):
            rankme(zero.index_fill(0, torch.tensor([3]), bad))
    with raises(TokensError, subject="views"):
        lidar(torch.randn(8, 4))

"""Collapse across samples: each number against its authors' formula, written out in numpy, and at both extremes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankscope.errors import MetricError, TokensError
from rankscope.metrics.samples import alignment, alpha_req, lidar, rankme, rankme_floor, uniformity
from tests.raising import raises

SIZES = st.tuples(st.integers(2, 40), st.integers(1, 30), st.integers(0, 10**6))


def drawn(samples: int, width: int, seed: int) -> Tensor:
    return torch.randn(samples, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(SIZES)
@settings(max_examples=40, deadline=None)
def test_rankme_is_that_of_the_paper_and_lies_between_one_and_the_rank(size: tuple[int, int, int]) -> None:
    Z = drawn(*size)
    s = np.linalg.svd(Z.numpy(), compute_uv=False)
    p = s / np.abs(s).sum() + 1e-7
    assert float(rankme(Z)) == pytest.approx(np.exp(-np.sum(p * np.log(p))), rel=1e-9)
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
    values = np.linalg.eigvalsh(np.cov(Z.numpy().T, bias=True))[::-1]
    ranks = np.arange(11, 51)
    x = np.stack([-np.log(ranks), np.ones(40)], 1)
    w = np.diag(1 / ranks)
    slow = np.linalg.solve(x.T @ w @ x, x.T @ w @ np.log(values[10:50]))[0]
    assert float(alpha_req(Z)) == pytest.approx(slow, rel=1e-9)
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
    X = Z.numpy()
    centre = X.mean(1)
    B = sum(np.outer(m, m) for m in centre - centre.mean(0)) / samples
    W = sum(np.outer(e, e) for e in (X - centre[:, None]).reshape(-1, width)) / (samples * views) + 1e-4 * np.eye(width)
    values, vectors = np.linalg.eigh(W)
    root = vectors @ np.diag(values**-0.5) @ vectors.T
    eigenvalues = np.linalg.eigvalsh(root @ B @ root).clip(0)
    p = eigenvalues / eigenvalues.sum() + 1e-8
    assert float(lidar(Z)) == pytest.approx(np.exp(-np.sum(p * np.log(p))), rel=1e-6)


def test_lidar_counts_directions_that_tell_samples_apart_only() -> None:
    apart = torch.cat([10 * drawn(200, 3, 0), torch.zeros(200, 13)], 1)[:, None]
    noise = 0.1 * drawn(200 * 8, 16, 1).reshape(200, 8, 16)
    assert 2.5 < float(lidar(apart + noise)) < 3.1
    assert float(rankme((apart + noise).flatten(0, 1))) > float(lidar(apart + noise))
    assert math.isnan(float(lidar(torch.ones(4, 2, 3))))


@pytest.mark.parametrize("samples", [5, 300])  # both ways to compute distances
def test_uniformity_and_alignment_are_those_of_the_paper(samples: int) -> None:
    Z, other = drawn(samples, 8, 2), drawn(samples, 8, 3)
    x, y = (z / z.norm(dim=1, keepdim=True) for z in (Z, other))
    expected = torch.pdist(x).pow(2).mul(-2).exp().mean().log()
    assert float(uniformity(Z)) == pytest.approx(float(expected), rel=1e-9)
    assert float(alignment(Z, other)) == pytest.approx(float((x - y).norm(dim=1).pow(2).mean()), rel=1e-12)
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

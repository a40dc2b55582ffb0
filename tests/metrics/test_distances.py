"""Largest distances of rows against the differences of all pairs, by torch and by the kernel for GPUs."""

import math
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rankscope.metrics import largest_square_distance, largest_sum_distance, max_cosine_gap
from tests.interpreted import needs_interpreter
from tests.strategies import matrices


@given(matrices(rows=(1, 40), columns=(1, 40)), st.integers(0, 40), st.sampled_from([0.0, 1.0, 1e8]), st.booleans())
def test_products_give_the_largest_difference(X: Tensor, row: int, shift: float, about_mean: bool) -> None:
    """Rows far from zero and close to each other: about their mean or one of them, nothing is lost."""
    X = X + shift
    R = X - (X.mean(0) if about_mean else X[row % len(X)])
    expected = float((R[:, None] - R).square().sum(-1).max())
    if not about_mean or expected >= 1e-30 * float(X.square().max()):  # else the mean of equal rows was rounded
        assert float(largest_square_distance(R)) == pytest.approx(expected, rel=1e-12)
        assert float(largest_square_distance(R, at_once=8 * len(X) * 3)) == pytest.approx(expected, rel=1e-12)


@given(matrices(rows=(1, 12)), st.sampled_from([1.0, 1e-3, 1e-7]), st.integers(0, 99))
def test_the_widest_angle_is_that_of_the_differences_of_unit_vectors(X: Tensor, apart: float, seed: int) -> None:
    """Also where all tokens point nearly the same way, where one is padding, and where one points nowhere."""
    generator = torch.Generator().manual_seed(seed)
    X = apart * X + X.shape[1] * torch.randn(X.shape[1], generator=generator, dtype=torch.float64)
    X[torch.rand(len(X), generator=generator) < 0.1] = 0.0
    padding = torch.rand(len(X), generator=generator) < 0.2
    length = X.norm(dim=-1, keepdim=True)
    u, nowhere = (X / length.masked_fill(length == 0, 1.0))[~padding], (length == 0)[~padding, 0]
    gaps = (u[:, None] - u).square().sum(-1) / 2
    gaps = gaps.masked_fill(nowhere | nowhere[:, None], 1.0).fill_diagonal_(0.0)
    expected = float(gaps.max()) if len(u) else math.nan
    off = 1e-15 * math.sqrt(expected) if len(u) else 0.0  # unit vectors are known to eps
    assert float(max_cosine_gap(X, padding)) == pytest.approx(expected, rel=1e-12, abs=off, nan_ok=True)


def kernel(P: Tensor, valid: Tensor | None = None, rows: int = 32) -> Tensor:
    """The largest L1 distances by Triton's interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        fused: Any = import_module("rankscope.metrics.distances_triton")
        patch.setattr(fused, "ROWS", rows)
        return fused.fused_sum_distance(P, valid)


@needs_interpreter
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 12), st.integers(1, 6)),
    rows=st.sampled_from([2, 4, 32]),
    padded=st.booleans(),
    turned=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_the_kernel_gives_the_largest_sum(
    shape: tuple[int, ...], rows: int, padded: bool, turned: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    P = torch.randn(shape, generator=generator, dtype=torch.float64)
    P = P.mT.contiguous().mT if turned else P
    valid = torch.rand(shape[:3], generator=generator) < 0.7 if padded else None
    found = kernel(P, valid, rows)
    assert torch.equal(found, kernel(P, valid, rows))
    torch.testing.assert_close(found, largest_sum_distance(P, valid), rtol=1e-13, atol=0.0)


@needs_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, which meets NaN
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("row", [0, 4, 8])
def test_the_kernel_loses_no_nan(bad: float, row: int) -> None:
    P = torch.randn(3, 9, 5, dtype=torch.float64)
    P[1, row, 2] = bad
    assert kernel(P, rows=4).isnan().tolist() == largest_sum_distance(P).isnan().tolist() == [False, True, False]

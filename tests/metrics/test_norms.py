"""Norms taken together and largest distances, by torch and by the kernels for GPUs, against the plain formulas."""

import math
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rankscope.metrics import (
    METRICS,
    composite_norm,
    frobenius_norm,
    largest_square_distance,
    largest_sum_distance,
    max_cosine_gap,
    metric,
    tokens_of,
)  # fmt: skip
from rankscope.metrics import norms as module
from rankscope.metrics.base import tokens
from rankscope.metrics.norms import max_norm, token_norms
from tests.interpreted import needs_interpreter
from tests.strategies import matrices

FAMILY = ["residual", "relative_residual", "mu", "relative_mu", "max_residual", "relative_max_residual"]
SIZES = [1.0, 1e-3, 1e160, 1e-160, 1e-300, 1e300]


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor | None]:
    """Tokens of any size, some columns much larger than others, some samples equal; and which of them are valid."""
    batch, n, d = draw(st.integers(1, 3)), draw(st.integers(0, 40)), draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    X = torch.randn(batch, n, d, generator=generator, dtype=torch.float64)
    X[0] = X[0, :1] if draw(st.booleans()) else X[0]
    X = X * 10.0 ** torch.randint(-6, 7, (d,), generator=generator) if draw(st.booleans()) else X
    X = X.to(draw(st.sampled_from([torch.float64, torch.float32])))
    X = X * draw(st.sampled_from(SIZES if X.dtype == torch.float64 else SIZES[:2]))
    if draw(st.booleans()):
        return X.mT.contiguous().mT if draw(st.booleans()) else X, None
    return X, torch.rand(batch, n, generator=generator) < draw(st.sampled_from([0.0, 0.5, 0.9]))


def plain(X: Tensor, valid: Tensor | None) -> Tensor:
    """The definitions in float64, in units of the largest entry."""
    X = X.double()
    if valid is not None:
        X = X.masked_fill(~valid[..., None], 0.0)
    unit = X.abs().amax((1, 2), keepdim=True) if X.numel() else X.new_ones(len(X), 1, 1)
    unit = unit.masked_fill(unit == 0, 1.0)
    X = X / unit
    rows = torch.ones(X.shape[:2], dtype=torch.bool) if valid is None else valid
    R = (X - X.sum(1, keepdim=True) / rows.sum(1).clamp(min=1)[:, None, None]) * rows[..., None]
    norms = [torch.stack([norm(A) for A in (X, R)]) for norm in (composite_norm, frobenius_norm, max_norm)]
    return torch.stack(norms) * unit[:, 0, 0]


def check(X: Tensor, valid: Tensor | None, found: Tensor) -> None:
    """Rounding of the mean moves every entry of the residual by eps of the tokens' size."""
    expected = plain(X, valid)
    eps = torch.finfo(torch.float64).eps
    assert found.shape == expected.shape
    for norm, other in zip(found, expected, strict=True):
        off = 8 * eps * (other + math.sqrt(max(1, X.shape[1])) * other[0]) + 5e-324
        same = ((norm - other).abs() <= off) | (norm == other)  # infinite where the norm is out of range
        assert bool(same.all()), (found, expected)


@given(batch=batches(), piece=st.sampled_from([1, 200, 2**17]))
def test_pieces_give_the_plain_formulas(batch: tuple[Tensor, Tensor | None], piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", piece)
        check(*batch, token_norms(*batch))


@needs_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@given(batch=batches(), entries=st.sampled_from([32, 1024]))
def test_the_kernel_gives_the_plain_formulas(batch: tuple[Tensor, Tensor | None], entries: int) -> None:
    X, valid = batch
    if not X.numel():
        return  # no kernel is started for nothing
    check(X, valid, kernel(X, valid, entries))


def kernel(X: Tensor, valid: Tensor | None, entries: int = 1024) -> Tensor:
    """The norms by Triton's interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        fused: Any = import_module("rankscope.metrics.norms_triton")
        patch.setattr(fused, "ENTRIES", entries)
        return fused.fused_token_norms(X, valid)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("of", ["torch", pytest.param("kernel", marks=needs_interpreter)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_sample_that_is_not_finite_is_nan_and_no_other(of: str, bad: float) -> None:
    X, valid = torch.randn(3, 5, 20), torch.ones(3, 5, dtype=torch.bool)
    X[0, 1, 17], X[2, 4, 3], valid[2, 4] = bad, bad, False
    norms = (token_norms if of == "torch" else kernel)(X, valid)
    assert bool(norms[..., 0].isnan().all()) and bool(norms[..., 1:].isfinite().all())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@given(X=matrices(), seed=st.integers(0, 99))
def test_large_tokens_have_the_metrics_of_small_ones(X: Tensor, seed: int) -> None:
    """Tokens whose norms are taken together, with a broken sample among them, and tokens whose norms are not."""
    batch = X.repeat(3, 1, 1)
    batch[1, 0, 0] = math.nan
    padding = torch.rand(batch.shape[:2], generator=torch.Generator().manual_seed(seed)) < 0.3
    padding[1, 0] = False
    alone = {name: metric(name).compute(X.expand_as(batch), padding) for name in FAMILY}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LARGE", dict.fromkeys(module.LARGE, 0))
        ready, broken = tokens_of(batch, ~padding)
        together = {name: metric(name).compute(ready) for name in FAMILY}
        assert metric("mu").compute(tokens(X, None)) == pytest.approx(float(metric("mu").compute(X)))
    assert broken.tolist() == [False, True, False]
    for name in FAMILY:
        a, b = alone[name], together[name]
        assert float(b[1]) == 0.0
        size = float(METRICS[name].scale(X)) if METRICS[name].scale else 1.0
        assert torch.allclose(a[::2], b[::2], rtol=1e-12, atol=1e-13 * size, equal_nan=True)


def test_norms_of_large_tokens_have_gradients() -> None:
    X = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LARGE", dict.fromkeys(module.LARGE, 0))
        metric("mu").compute(X).sum().backward()
    R = X.detach() - X.detach().mean(1, keepdim=True)
    torch.testing.assert_close(X.grad, R / R.norm(dim=(1, 2), keepdim=True))


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


def distances(P: Tensor, valid: Tensor | None = None, rows: int = 32) -> Tensor:
    """The largest L1 distances by Triton's interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        fused: Any = import_module("rankscope.metrics.norms_triton")
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
    found = distances(P, valid, rows)
    assert torch.equal(found, distances(P, valid, rows))
    torch.testing.assert_close(found, largest_sum_distance(P, valid), rtol=1e-13, atol=0.0)


@needs_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, which meets NaN
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("row", [0, 4, 8])
def test_the_kernel_loses_no_nan(bad: float, row: int) -> None:
    P = torch.randn(3, 9, 5, dtype=torch.float64)
    P[1, row, 2] = bad
    assert distances(P, rows=4).isnan().tolist() == largest_sum_distance(P).isnan().tolist() == [False, True, False]

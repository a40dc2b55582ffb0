"""Tokens made ready once and measured many times give what they give when measured alone."""

import math

import pytest
import torch
from torch import Tensor

from rankscope.errors import TokensError
from rankscope.metrics import METRICS, metric, tokens_of
from rankscope.metrics.base import tokens
from tests.raising import raises

NAMES = [*(name for name, known in METRICS.items() if known.of == "tokens"), "mu@midrange", "residual@argmin"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("padded", [False, True])
def test_sharing_changes_no_bit(dtype: torch.dtype, padded: bool) -> None:
    X = torch.randn(3, 5, 4, dtype=dtype)
    padding = (torch.arange(5) >= torch.tensor([5, 3, 2])[:, None]) & padded
    shared, (live, broken) = tokens(X, padding), tokens_of(X, ~padding)
    assert not broken.any()
    for name in [*NAMES, *reversed(NAMES)]:
        alone = metric(name).read(X, padding)
        for ready in (shared, live):
            again = metric(name).read(ready)
            assert torch.equal(alone.value, again.value) and torch.equal(alone.floor, again.floor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_samples_that_are_not_finite_are_told_from_those_that_are(dtype: torch.dtype) -> None:
    X = torch.randn(4, 5, 4, dtype=dtype)
    X[0, 1, 2], X[1, 0, 0], X[2, 4, 3] = torch.nan, -torch.inf, torch.nan
    valid = torch.ones(4, 5, dtype=torch.bool)
    valid[2, 4] = False  # padding may hold anything
    ready, broken = tokens_of(X, valid)
    assert broken.tolist() == [True, True, False, False]
    assert bool(ready.X.isfinite().all())


def test_large_numbers_are_finite() -> None:
    ready, broken = tokens_of(torch.full((1, 2, 2), 1e200, dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool))
    assert not broken.any()
    assert float(metric("relative_mu").read(ready).value) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_are_refused_with_the_sample_that_holds_them(bad: float) -> None:
    X = torch.zeros(3, 2, 4)
    X[1, 1, 2] = bad
    with raises(TokensError, "X") as caught:
        metric("mu").compute(X)
    assert "[1]" in str(caught.value)


@pytest.mark.parametrize(
    ("X", "padding", "subject"),
    [
        (torch.ones(3, dtype=torch.float64), None, "X"),
        (torch.ones(3, 2, dtype=torch.int64), None, "X"),
        (torch.ones(3, 2), torch.zeros(3), "padding"),
        (torch.ones(3, 2), torch.zeros(2, dtype=torch.bool), "padding"),
    ],
)
def test_wrong_shapes_and_dtypes_are_refused(X: Tensor, padding: Tensor | None, subject: str) -> None:
    with raises(TokensError, subject):
        metric("residual").compute(X, padding)

"""Massive activations and long tokens, against numpy and at the papers' criteria."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.metrics import metric
from rankscope.metrics.outliers import (
    _median_by_sorting,
    activation_ratio,
    high_norm_tokens,
    massive_activations,
    token_norm_ratio,
    where,
)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 10**6), st.floats(0.5, 1e4))
@settings(max_examples=60, deadline=None)
def test_numbers_are_those_of_sorted_entries(n: int, d: int, seed: int, gain: float) -> None:
    X = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    X[0, 0] *= gain
    entries, lengths = np.sort(np.abs(X.numpy()), axis=None), np.sort(np.linalg.norm(X.numpy(), axis=1))
    middle, middle_length = entries[(n * d - 1) // 2], lengths[(n - 1) // 2]
    assert float(activation_ratio(X)) == pytest.approx(entries[-1] / middle)
    assert float(token_norm_ratio(X)) == pytest.approx(lengths[-1] / middle_length)
    assert float(massive_activations(X)) == (entries > 1000 * middle).sum()
    assert float(high_norm_tokens(X)) == (lengths > 5 * middle_length).sum()
    assert float(activation_ratio(1e-8 * X)) == pytest.approx(float(activation_ratio(X)))


def test_the_criteria_of_the_papers() -> None:
    X = 0.05 * torch.randn(2, 10, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    X[0, 0, 7], X[1, 3, 9] = 150.0, 90.0
    assert massive_activations(X).tolist() == [1, 1]
    assert massive_activations(X, least=100.0).tolist() == [1, 0]
    assert where(X, least=100.0).nonzero().tolist() == [[0, 0, 7]]
    assert high_norm_tokens(X, times=0.0, least=100.0).tolist() == [1, 0]
    assert metric("high_norm_tokens").read(X).value.tolist() == [1, 1]


def test_padding_is_no_outlier() -> None:
    X = torch.ones(1, 4, 8)
    X[0, 3] = 1e6
    padding = torch.tensor([[False, False, False, True]])
    assert float(activation_ratio(X, padding)) == 1 and float(high_norm_tokens(X, padding)) == 0


@given(st.lists(st.floats(-1e3, 1e3, width=32) | st.just(float("nan")), min_size=1, max_size=40))
def test_the_median_of_a_gpu_is_that_of_a_cpu(numbers: list[float]) -> None:
    x = torch.tensor([numbers, numbers[::-1]], dtype=torch.float64)
    torch.testing.assert_close(_median_by_sorting(x), x.nanmedian(-1).values, rtol=0, atol=0, equal_nan=True)

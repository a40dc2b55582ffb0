import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rankscope.errors import MetricError, TokensError
from rankscope.metrics import (
    Metric,
    RowStatistics,
    dobrushin,
    effective_keys,
    entropy,
    first_token_mass,
    from_statistics,
    largest_logit,
    metric,
    row_sum_defect,
    second_singular_value,
    spectral_gap,
)
from rankscope.metrics.attention import METRICS
from tests.raising import raises
from tests.strategies import stochastic


def test_rows_that_are_no_weights_have_no_entropy() -> None:
    P = torch.full((1, 1, 4, 4), 0.25)
    for rows in (2 * P, P - torch.eye(4), 0 * P + torch.eye(4) * 1.2, P.tril(-1), 0 * P):
        assert entropy(rows).isnan().all() and effective_keys(rows).isnan().all()
    near = P.to(torch.bfloat16) * 1.004  # a sum as bfloat16 rounds it
    assert entropy(near).isfinite().all()


@given(stochastic())
def test_dobrushin_is_the_largest_total_variation_of_two_rows(P: Tensor) -> None:
    rows = P.numpy()
    slow = max((np.abs(a - b).sum() / 2 for a, b in itertools.combinations(rows, 2)), default=0.0)
    assert dobrushin(P[None]).item() == pytest.approx(slow, abs=1e-14)


@given(stochastic(), st.integers(0, 999))
def test_dobrushin_bounds_the_contraction_of_oscillation(P: Tensor, seed: int) -> None:
    x = torch.randn(len(P), 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def osc(y: Tensor) -> Tensor:
        return y.amax(0) - y.amin(0)

    assert bool((osc(P @ x) <= dobrushin(P[None]) * osc(x) + 1e-12).all())


@given(stochastic(), st.integers(0, 999))
def test_dobrushin_is_submultiplicative(P: Tensor, seed: int) -> None:
    scores = torch.randn(P.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    Q = scores.softmax(-1)
    assert dobrushin((P @ Q)[None]) <= dobrushin(P[None]) * dobrushin(Q[None]) + 1e-12


@pytest.mark.parametrize("n", [1, 2, 9])
def test_uniform_and_identity_attention(n: int) -> None:
    uniform, identity = torch.full((1, n, n), 1 / n), torch.eye(n)[None]
    assert dobrushin(uniform).item() == 0
    assert entropy(uniform).item() == pytest.approx(math.log(n), abs=1e-6)
    assert second_singular_value(uniform).item() == pytest.approx(0, abs=1e-7)
    assert first_token_mass(uniform).item() == pytest.approx(1 / n)
    assert dobrushin(identity).item() == (1 if n > 1 else 0)
    assert entropy(identity).item() == 0
    assert spectral_gap(identity).item() == pytest.approx(0 if n > 1 else 1)
    assert row_sum_defect(identity).item() == 0


@given(stochastic())
def test_effective_keys_are_at_most_e_to_the_entropy(P: Tensor) -> None:
    slow = np.mean([1 / sum(weight**2 for weight in row) for row in P.numpy()])
    assert effective_keys(P[None]).item() == pytest.approx(slow, rel=1e-12)
    rows = 1 / P.square().sum(-1)
    H = -torch.special.xlogy(P, P).sum(-1)
    assert bool((rows.log() <= H + 1e-9).all()) and 1 - 1e-9 <= effective_keys(P[None]).item() <= len(P) + 1e-9


def test_the_largest_logit_is_that_of_tokens() -> None:
    S = torch.tensor([[[[-3.0, 9.0], [-1.0, -2.0]]]])
    assert largest_logit(S).item() == 9
    hidden = S.masked_fill(torch.tensor([[False, True], [False, False]]), -math.inf)
    assert largest_logit(hidden).item() == -1
    assert largest_logit(S, torch.tensor([[False, True]])).item() == -3
    assert largest_logit(S, torch.tensor([[True, False]])).item() == -2
    empty = torch.full_like(S, -math.inf)
    for none in (empty, S.masked_fill(S == 9, math.nan), S.masked_fill(S == 9, math.inf), S[..., :0, :0]):
        assert largest_logit(none).isnan().all()
    assert largest_logit(S, torch.tensor([[True, True]])).isnan().all()


def test_readings_off_rows_leave_padding_and_blind_rows_out() -> None:
    """Of three queries one is padding and one sees no key; the largest logit may be negative."""
    number = torch.tensor([[[-5.0, 7.0, -math.inf]]])
    nan = torch.tensor([[[0.5, 0.25, math.nan]]])
    found = RowStatistics(log_sum=nan, mean=nan - 0.125, largest=number, first=nan, square=nan)
    valid = torch.tensor([[True, False, True]])

    def read(name: str, valid: Tensor) -> float:
        ((_, reading),) = from_statistics([metric(name)], found, valid, 1e-7)
        return reading.value.item()

    assert read("largest_logit", valid) == -5
    assert read("first_token_mass", valid) == 0.25  # a row of zeros has no weight on any token
    assert math.isnan(read("entropy", valid)) and math.isnan(read("effective_keys", valid))
    seen = torch.tensor([[True, True, False]])
    assert read("entropy", seen) == 0.125 and read("effective_keys", seen) == 3.0
    nobody = torch.zeros(1, 3, dtype=torch.bool)
    for name in ("entropy", "first_token_mass", "effective_keys", "largest_logit"):
        assert math.isnan(read(name, nobody))
    ((_, reading),) = from_statistics([metric("entropy")], found, seen, 1e-9)
    eps = torch.finfo(torch.float32).eps
    assert reading.floor.item() == pytest.approx(8 * 7 * eps)  # scores of size 7 are rounded by eps of it


def test_a_metric_of_scores_says_how_it_is_read() -> None:
    with raises(MetricError, subject="from_scores"):
        Metric("mine", largest_logit, of="scores")


@given(stochastic())
def test_singular_values_are_numpys(P: Tensor) -> None:
    s = [*np.linalg.svd(P.numpy(), compute_uv=False), 0.0]
    assert second_singular_value(P[None]).item() == pytest.approx(s[1], abs=1e-12)
    assert spectral_gap(P[None]).item() == pytest.approx(s[0] - s[1], abs=1e-12)


def test_first_token_is_the_first_real_one() -> None:
    P = torch.zeros(1, 2, 4, 4)
    P[..., 1] = 1.0
    padding = torch.tensor([[True, False, False, False]])
    assert first_token_mass(P, padding).tolist() == [[1.0, 1.0]]
    assert first_token_mass(P).tolist() == [[0.0, 0.0]]


def test_rows_that_do_not_sum_to_one_are_told() -> None:
    P = torch.full((1, 3, 3), 0.25)
    assert row_sum_defect(P).item() == pytest.approx(0.25)


def test_signed_attention_has_no_entropy() -> None:
    P = torch.tensor([[[1.5, -0.5], [0.5, 0.5]]])
    assert math.isnan(entropy(P).item())


def test_attention_that_is_not_square_is_a_sentence() -> None:
    with raises(TokensError, subject="P"):
        dobrushin(torch.ones(2, 3, 4))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("tokens", [3, 300])
def test_a_head_that_is_not_finite_has_no_value_and_leaves_others_theirs(bad: float, tokens: int) -> None:
    """NaN, and marked; whether the matrix is small or read by rows."""
    P = torch.rand(2, 2, tokens, tokens, dtype=torch.float64).softmax(-1)
    broken = P.clone()
    broken[1, 0, 1, 2] = bad
    for known in METRICS:
        whole, found = known.read(P), known.read(broken)
        assert found.value[1, 0].isnan() and found.below_floor[1, 0]
        kept = torch.tensor([[True, True], [False, True]])
        torch.testing.assert_close(found.value[kept], whole.value[kept], rtol=1e-12, atol=1e-13)

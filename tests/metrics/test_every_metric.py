"""What holds for every metric alike: padding, precision, degenerate input, floors."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rankscope.metrics import METRICS, metric

TOKENS = [m.name for m in METRICS.values() if m.of == "tokens"]
ATTENTION = [m.name for m in METRICS.values() if m.of == "attention"]
CENTRED = ["residual@argmin", "relative_residual@midrange", "max_residual@midrange", "mu@argmin"]


def padded(rows: Tensor, before: int, after: int, filler: float) -> tuple[Tensor, Tensor]:
    """Rows among padding that must not matter, and the padding."""
    n, d = rows.shape
    X = torch.full((before + n + after, d), filler, dtype=rows.dtype)
    X[before : before + n] = rows
    padding = torch.ones(len(X), dtype=torch.bool)
    padding[before : before + n] = False
    return X, padding


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", TOKENS + CENTRED)
@given(n=st.integers(1, 5), before=st.integers(0, 2), after=st.integers(0, 3), seed=st.integers(0, 999))
def test_a_padded_batch_gives_what_each_sequence_gives_alone(
    name: str, n: int, before: int, after: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    full = torch.randn(before + n + after, 4, generator=generator, dtype=torch.float64)
    short = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    X, padding = padded(short, before, after, filler=math.nan)
    batch, mask = torch.stack([full, X]), torch.stack([torch.zeros_like(padding), padding])
    together = metric(name).compute(batch, mask)
    alone = torch.stack([metric(name).compute(full), metric(name).compute(short)])
    assert torch.allclose(together, alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ATTENTION)
@given(n=st.integers(1, 5), after=st.integers(0, 3), seed=st.integers(0, 999))
def test_padded_attention_gives_what_each_sequence_gives_alone(name: str, n: int, after: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    P = torch.randn(2, n, n, generator=generator, dtype=torch.float64).softmax(-1)
    whole = torch.full((1, 2, n + after, n + after), math.inf, dtype=torch.float64)
    whole[..., :n, :n] = P
    padding = torch.arange(n + after)[None] >= n
    assert torch.allclose(metric(name).compute(whole, padding)[0], metric(name).compute(P), atol=1e-12)


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lower_precision_is_upcast(name: str, dtype: torch.dtype) -> None:
    X = torch.randn(5, 4).to(dtype)
    unit = torch.finfo(dtype).eps
    narrow, upcast = metric(name).read(X), metric(name).read(X.double(), unit=unit)
    assert narrow.value.dtype == torch.float64
    assert torch.equal(narrow.value, upcast.value)
    assert torch.equal(narrow.floor, upcast.floor)


ZERO_MATRIX = {**dict.fromkeys(TOKENS, 0.0), "mean_cosine_gap": 1.0, "max_cosine_gap": 1.0}
ONE_TOKEN = {"mean_cosine": 1.0, "mean_abs_cosine": 1.0, "min_cosine": 1.0, "sigma_min": 2.0,
             "numerical_rank": 1.0, "stable_rank": 1.0, "effective_rank": 1.0,
             "participation_ratio": 1.0, "token_norm_ratio": 1.0,
             # Two of its three entries are zero, and so is their median.
             "activation_ratio": math.nan, "massive_activations": math.nan}  # fmt: skip


@pytest.mark.parametrize("name", TOKENS)
def test_zero_matrix_one_token_and_no_token_have_their_answers(name: str) -> None:
    compute = metric(name).compute
    assert compute(torch.zeros(3, 4)).item() == ZERO_MATRIX[name]
    one = torch.tensor([[0.0, 2.0, 0.0]])
    assert compute(one).item() == pytest.approx(ONE_TOKEN.get(name, 0.0), nan_ok=True)
    assert math.isnan(compute(torch.ones(3, 4), torch.ones(3, dtype=torch.bool)).item())
    assert math.isnan(compute(torch.ones(0, 4)).item())


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_without_tokens_has_no_value(name: str) -> None:
    P = torch.full((1, 2, 3, 3), 1 / 3)
    assert metric(name).compute(P, torch.ones(1, 3, dtype=torch.bool)).isnan().all()
    assert metric(name).compute(torch.ones(1, 2, 0, 0)).isnan().all()


@pytest.mark.parametrize("name", [*TOKENS, *ATTENTION])
def test_every_value_carries_its_floor(name: str) -> None:
    x = torch.rand(2, 3, 4, 4).softmax(-1)
    wide, narrow = metric(name).read(x.double()), metric(name).read(x.bfloat16())
    assert wide.value.shape == wide.floor.shape == wide.log10.shape == wide.below_floor.shape
    if METRICS[name].count:
        assert not wide.floor.any()
    else:
        assert bool((narrow.floor > wide.floor).all())


def test_equal_tokens_lie_at_the_floor_whatever_their_size() -> None:
    """Averaging equal rows rounds: what is left is below the floor, and is said to be."""
    for scale in (1e-30, 1.0, 1e30):
        X = scale * torch.randn(1, 16, dtype=torch.float64).expand(1000, 16)
        for name in ("residual", "relative_residual", "mu", "relative_mu", "max_residual"):
            assert bool(metric(name).read(X).below_floor)
        assert not bool(metric("mu").read(X + scale * 1e-13 * torch.randn(1000, 16)).below_floor)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", [*TOKENS, *CENTRED[1:]])
@given(exponent=st.integers(-280, 280), sign=st.sampled_from([-1.0, 1.0]))
def test_every_metric_follows_the_scale_by_its_degree(name: str, exponent: int, sign: float) -> None:
    """Squares and products of entries at the ends of the range must not leave it."""
    X = torch.randn(5, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    scale, degree = 10.0**exponent, metric(name).degree
    here, there = metric(name).read(X), metric(name).read(sign * scale * X)
    expected = here.value.item() * scale**degree
    assert there.value.item() == pytest.approx(expected, rel=1e-9, abs=0.0 if degree else 1e-12)
    assert torch.equal(here.below_floor, there.below_floor)


def test_a_count_of_zero_is_no_noise() -> None:
    assert not metric("affine_rank").read(torch.ones(3, 2)).below_floor


def test_leading_batch_axes_are_kept() -> None:
    X = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    for name in TOKENS:
        assert metric(name).compute(X).shape == (2, 3)
        assert torch.allclose(metric(name).compute(X)[1, 2], metric(name).compute(X[1, 2]), atol=1e-12)

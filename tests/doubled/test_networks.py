"""Deviation arithmetic in doubled precision against an independent network of hundreds of digits."""

import itertools
from typing import Any

import mpmath as mp
import pytest
import torch
from torch import Tensor

from rankscope.deviation import State, finish, propagate, rounded
from rankscope.doubled import Doubled, nearest
from rankscope.nets import Architecture, Transformer
from tests.builders import awake, normal
from tests.deviation.reference import Network, Rows
from tests.doubled.numbers import numbers

SMALL: dict[str, Any] = {"layers": 2, "width": 4, "heads": 2, "head_width": 2, "mlp_width": 6, "length": 8,
                         "bias_buckets": 8, "bias_reach": 6}  # fmt: skip


def deviation(X: Rows) -> list[Any]:
    """Every entry of X about the mean of its tokens."""
    mean = [mp.fsum(column) / len(X) for column in zip(*X, strict=True)]
    return [u - m for row in X for u, m in zip(row, mean, strict=True)]


def off(state: State, true: Rows) -> tuple[float, float]:
    """(largest error of R, as a share of its largest entry; log10 of that entry)."""
    R = state.centred()[1]
    assert isinstance(R.value, Doubled) and isinstance(R.log, Doubled)
    scale, entries = mp.exp(next(numbers(R.log))), deviation(true)
    size = max(map(abs, entries))
    error = max(abs(scale * a - b) for a, b in zip(numbers(R.value[0]), entries, strict=True))
    return float(error / size), float(mp.log10(size))


def compare(net: Transformer, X: Tensor, digits: int = 60) -> list[tuple[float, float]]:
    """Of every layer."""
    with mp.workdps(digits):
        states = Network(net).states(X[0])
        return [off(step.state, true) for step, true in zip(propagate(net, X, doubled=True), states, strict=True)]


CHOICES: dict[str, list[Any]] = {
    "activation": ["gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "tanh", "identity"],
    "norm": ["layer", "rms", "scale", "none"],
    "norm_place": ["pre", "post", "sandwich"],
    "positions": ["none", "absolute", "relative", "rotary", "bias", "alibi"],
    "mask": ["complete", "causal", "window:1"],
    "kernel": ["gaussian", "softmax", "softmax", "uniform"],
    "mlp": ["plain", "gated"],
    "attention_skip": [1.0, 0.5, 0.0],
    "parallel": [False, True, False],
    "key_heads": [2, 1],
    "query_norm": [False, False, True],
    "score_cap": [0.0, 0.5, 3.0, 0.0],
}
"""Each is gone through in turn, at its own pace: their lengths differ. (Gaussian and rotary do not meet: the
rule takes rotations to keep lengths, which rounded cosines and sines do to 16 digits.)"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(7))
def test_states_to_thirty_digits(number: int) -> None:
    fields = {name: values[number % len(values)] for name, values in CHOICES.items()}
    net = awake(Architecture(**SMALL, **fields), number)
    for error, _ in compare(net, normal(1, 4, 4, seed=number + 1)):
        assert error < 3e-30, fields


@pytest.mark.slow
@pytest.mark.parametrize("activation", CHOICES["activation"])
@pytest.mark.parametrize("positions", CHOICES["positions"])
def test_every_activation_and_position_with_every_norm(positions: Any, activation: Any) -> None:
    others = itertools.product(CHOICES["norm"], CHOICES["norm_place"], CHOICES["mlp"], ["complete", "causal"])
    for seed, (norm, place, mlp, mask) in enumerate(others):
        arch = Architecture(**SMALL, positions=positions, activation=activation, norm=norm, norm_place=place,
                            mlp=mlp, mask=mask)  # fmt: skip
        for error, _ in compare(awake(arch, seed), normal(1, 4, 4, seed=seed + 1)):
            assert error < 1e-29, arch


def test_pure_attention_far_below_floating_point() -> None:
    """Each layer cubes the residual, and with it triples its relative error."""
    arch = Architecture(**{**SMALL, "layers": 6}, norm="layer", mlp="none", attention_skip=0.0, biases=False)
    found = compare(awake(arch, 1), normal(1, 4, 4, seed=2), digits=600)
    for layer, (error, _) in enumerate(found):
        assert error < 1e-30 * 3**layer
    assert found[-1][1] < -330


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("activation", "apart"),
    [("gelu", 1e-3), ("gelu", 1e-20), ("gelu_tanh", 1e-3), ("quick_gelu", 1e-3), ("silu", 1e-3), ("tanh", 1e-3)],
)
def test_tokens_that_hardly_differ(activation: str, apart: float) -> None:
    """Where a series takes the place of a difference."""
    arch = Architecture(**{**SMALL, "layers": 1}, norm="rms", activation=activation)
    common, R = normal(1, 1, 4, seed=5), apart * normal(1, 3, 4, seed=6)
    X = Doubled.of(common) + R
    net = awake(arch, 3)
    with mp.workdps(90):
        reference, flat = Network(net), list(numbers(X))
        true = reference.layer(0, [flat[4 * i : 4 * i + 4] for i in range(3)])
        *_, last = propagate(net, X, doubled=True)
        # X itself holds R to 32 digits of X only.
        assert off(last.state, true)[0] < 3e-30


def test_padding_and_rounding() -> None:
    """Padding stands anywhere; a rounded step is what float64 gives, to its own rounding."""
    arch = Architecture(
        layers=2, width=8, heads=2, positions="rotary", mask="causal", norm_place="pre", final_norm=True
    )
    net, X = awake(arch, 2), normal(2, 5, 8, seed=3)
    padding = torch.tensor([[0, 0, 0, 0, 0], [1, 0, 0, 1, 0]]).bool()
    for one, other in zip(propagate(net, X, padding), propagate(net, X, padding, doubled=True), strict=True):
        step = rounded(other)
        for mine, plain in ((step.state.R, one.state.R), (step.state.x, one.state.x)):
            assert type(mine.value) is Tensor and type(mine.log) is Tensor
            assert torch.allclose(mine.explicit(), plain.explicit(), rtol=1e-12, atol=1e-13)
        if step.attention is not None and one.attention is not None:
            assert torch.allclose(step.attention.matrix(), one.attention.matrix(), rtol=1e-12, atol=1e-13)
        if step.heads is not None and one.heads is not None:
            assert torch.allclose(step.heads.R.explicit(), one.heads.R.explicit(), rtol=1e-12, atol=1e-13)
    done = finish(net, other.state)
    assert isinstance(done.R.value, Doubled)
    assert torch.allclose(nearest(done.tokens()), finish(net, one.state).tokens(), rtol=1e-12, atol=1e-13)


def test_equal_tokens_and_no_tokens() -> None:
    net = awake(Architecture(**SMALL), 4)
    *_, last = propagate(net, normal(1, 1, 4).expand(1, 5, 4), doubled=True)
    assert not bool(nearest(last.state.R.value).any())
    *_, none = propagate(net, normal(1, 0, 4), doubled=True)
    assert none.state.R.value.shape == (1, 0, 4)

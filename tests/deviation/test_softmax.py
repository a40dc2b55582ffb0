"""Attention as one shared row and the rest, where scores are large and where they are steep."""

import math

import pytest
import torch

from rankscope.deviation import propagate
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import measure
from tests.builders import normal
from tests.deviation.reference import compare


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mask", ["complete", "causal"])
@pytest.mark.parametrize("divisor", [0.05, 0.3])
@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_sharp_attention(mask: str, divisor: float, scale: float) -> None:
    """Rows that all look at one token: the rest of their weights is e^-30 and less, and still counts."""
    arch = Architecture(layers=3, width=4, heads=1, norm="none", mlp="none", attention_skip=0.0, mask=mask,
                        divisor=divisor)  # fmt: skip
    # Some of the others form clusters that R cannot hold.
    sure = scale == 1 and (mask, divisor) != ("causal", 0.05)
    for seed in range(3):
        compare(arch, seed, scale, sure=sure)


def tokens(n: int, width: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return normal(batch, n, width, seed=seed)


def test_scores_beyond_the_range_are_cut_alike() -> None:
    """Tokens of 1e140: attention is an argmax, the same that float64 finds."""
    net = Transformer.random(Architecture(layers=1, width=8, heads=1, norm="none", mlp="none"), init="xavier")
    for seed in range(20):
        X = 1e140 * (tokens(1, 8, seed=seed) + 0.1 * tokens(5, 8, seed=seed + 100))
        *_, plain = net.steps(X)
        *_, step = propagate(net, X)
        assert torch.allclose(step.state.tokens(), plain.state, rtol=1e-9, atol=0)


def test_attention_is_never_negative_and_has_its_entropy() -> None:
    arch = Architecture(layers=2, width=8, heads=2, norm="rms", norm_place="pre", divisor=0.02)
    for seed in range(8):
        net = Transformer.random(arch, seed=seed, init="xavier")
        entropy = measure(net, tokens(5, 8, seed=seed), metrics="entropy").curve("entropy")[:, 1:]
        plain = measure(net, tokens(5, 8, seed=seed), metrics="entropy", arithmetic="float64").curve("entropy")
        assert torch.allclose(entropy, plain[:, 1:], atol=1e-10)


@pytest.mark.parametrize("scale", [1e4, 1e8, 1e10, 1e13])
def test_huge_scores_leave_shares_at_most_one(scale: float) -> None:
    """Scores of 1e12 and more: what is summed cancels, and a share of attention stays a share."""
    arch = Architecture(layers=1, width=16, heads=2, norm="none", mlp="none", attention_skip=0.0)
    net = Transformer.random(arch, init="xavier")
    for seed in range(5):
        X = scale * tokens(6, 16, seed=seed)
        *_, plain = net.steps(X)
        found = measure(net, X, metrics="mu").curve("mu", "log10")[0, 1]
        centred = plain.state - plain.state.mean(1, keepdim=True)
        assert float(found) == pytest.approx(math.log10(float(centred.norm())), abs=1e-6)

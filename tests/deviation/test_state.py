"""A common token and deviations from it: what is equal stays so, exactly."""

import math

import pytest
import torch

from rankscope.deviation import propagate
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import measure
from tests.builders import normal


def tokens(n: int, width: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return normal(batch, n, width, seed=seed)


@pytest.mark.parametrize("name", ["san", "san+norm", "san+mlp", "transformer"])
def test_equal_tokens_stay_exactly_equal(name: str) -> None:
    net = Transformer.random(Architecture(layers=3, width=8, heads=2), init="xavier").variant(name)
    X = tokens(1, 8).expand(2, 6, 8).clone()
    profile = measure(net, X, metrics=["residual", "relative_mu", "mean_cosine_gap", "affine_rank"])
    for each in profile.metrics:
        assert not profile.curve(each).any()
        assert bool((profile.curve(each, "log10") == -math.inf).all())
        assert not profile.curve(each, "below_floor").any()


def test_positions_tell_equal_tokens_apart() -> None:
    arch = Architecture(layers=2, width=8, heads=2, positions="absolute")
    net = Transformer.random(arch, init="xavier")
    profile = measure(net, tokens(1, 8).expand(1, 6, 8), metrics=["residual"])
    assert bool((profile.curve("residual") > 0).all())


def test_one_token_only_padding_and_silent_heads() -> None:
    net = Transformer.random(Architecture(layers=3, width=8, heads=2), init="xavier")
    assert not measure(net, tokens(1, 8)).curve("residual").any()
    nothing = measure(net, tokens(4, 8), torch.ones(1, 4, dtype=torch.bool))
    assert bool(nothing.curve("residual").isnan().all())
    assert bool(nothing.curve("residual", "log10").isnan().all())
    state = {k: torch.zeros_like(v) if ".query." in k else v for k, v in net.state_dict().items()}
    for silent in (net.variant(heads=[]), Transformer.from_weights(net.arch, state)):
        X = tokens(5, 8)
        for plain, step in zip(silent.steps(X), propagate(silent, X), strict=True):
            assert torch.allclose(step.state.tokens(), plain.state, atol=1e-12)
    # Zero queries without skips: one layer averages everything, exactly.
    san = Transformer.from_weights(net.arch, state).variant("san")
    assert measure(san, tokens(5, 8), metrics=["residual"]).curve("residual", "log10")[0, 1] == -math.inf

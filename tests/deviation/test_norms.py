"""Norms of a state: a norm is measured by its own formula, or in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rankscope.nets import Architecture, Norm, Transformer
from rankscope.nets.norms import NORMS
from rankscope.profiles import measure
from tests.builders import normal, thinned
from tests.deviation.reference import SMALL, compare


def largest(x: Tensor, eps: float) -> Tensor:
    return x.abs().amax(-1, keepdim=True) + eps


def networks(norm: str | Norm) -> Transformer:
    return Transformer.random(Architecture(layers=3, width=8, heads=2, norm=norm), seed=1)


def mu(net: Transformer, X: Tensor) -> tuple[Tensor, str]:
    profile = measure(net, X, metrics="mu")
    curve = profile.curve("mu")[0]
    return curve, profile.manifest.networks[0].arithmetic


def by_hand(net: Transformer, X: Tensor) -> Tensor:
    states = torch.stack(net.run(X).states)[:, 0]
    return torch.linalg.matrix_norm(states - states.mean(1, keepdim=True))


@pytest.mark.parametrize("name", ["largest", "layer"])
def test_a_norm_with_a_length_of_its_own_is_measured_in_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an object, under the name of a built-in norm, and where it is found by its name."""
    own, X = Norm(name, length=largest), 3 * normal(1, 5, 8, seed=2)
    expected = by_hand(networks(own), X)
    for norm in (own, name):
        with monkeypatch.context() as patch:
            patch.setitem(NORMS, name, own)
            curve, arithmetic = mu(networks(norm), X)
        assert arithmetic == "float64"
        torch.testing.assert_close(curve, expected, rtol=1e-12, atol=0.0)


def test_a_norm_brings_its_deviation_rule_as_the_built_in_ones_do() -> None:
    """Tokens over twice their root mean square: the rule says so in the operations it is given."""

    def length(x: Tensor, eps: float) -> Tensor:
        return 2 * (x.square().mean(-1, keepdim=True) + eps).sqrt()

    def rule(state: Any, eps: float, operations: Any) -> Any:
        half = operations.root_mean_square(state, eps, centred=False, averaged=True)
        return type(half)(half.x * 0.5, half.R * 0.5, half.valid)

    X = normal(1, 5, 8, seed=2)
    net = networks(Norm("half", length=length, deviation=rule))
    curve, arithmetic = mu(net, X)
    assert arithmetic == "deviation"
    torch.testing.assert_close(curve, by_hand(net, X), rtol=1e-10, atol=0.0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("norm", "scale", "eps"), thinned(("layer", "rms", "scale"), (1e-6, 1e-3, 1e3), (0.0, 1e-5)))
def test_norms_at_any_scale_of_tokens(norm: Any, scale: float, eps: float) -> None:
    arch = Architecture(**SMALL, norm=norm, norm_place="pre", norm_eps=eps, attention_skip=0.5)
    compare(arch, 0, scale)


@pytest.mark.parametrize("norm", ["layer", "rms", "scale"])
def test_zero_tokens_stay_zero_under_a_norm_without_eps(norm: Any) -> None:
    arch = Architecture(layers=2, width=8, heads=2, norm=norm, norm_place="pre", norm_eps=0.0, biases=False)
    profile = measure(Transformer.random(arch), torch.zeros(1, 4, 8), metrics=["mu", "relative_mu"])
    assert not profile.curve("mu").any() and not profile.curve("relative_mu").any()

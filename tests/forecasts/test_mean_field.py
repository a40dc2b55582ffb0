"""Mean-field theory against exact integrals, published limits, and random networks with each remedy."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rankscope.errors import ArchitectureError
from rankscope.forecasts import Moments, mean_field
from rankscope.forecasts.mean_field import expansion, products
from rankscope.nets import ACTIVATIONS, Architecture, Transformer
from rankscope.remedies import REMEDY_FILES
from tests.builders import normal


@pytest.mark.parametrize("rho", [-0.9, 0.0, 0.3, 0.9, 0.99, 1 - 1e-6])
def test_products_of_relu_are_the_arc_cosine_kernel(rho: float) -> None:
    C = torch.tensor([[[4.0, 2 * rho], [2 * rho, 1.0]]], dtype=torch.float64)
    kernel = (math.sqrt(1 - rho * rho) + rho * (math.pi - math.acos(rho))) / (2 * math.pi)
    ours = products(torch.relu, C)[0]
    assert float(ours[0, 0]) == pytest.approx(2.0) and float(ours[1, 1]) == pytest.approx(0.5)
    assert float(ours[0, 1]) == pytest.approx(2 * kernel, rel=1e-4)
    assert 0.5 - float(ours[0, 1]) / 2 == pytest.approx(0.5 - kernel, rel=5e-3)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("std", [0.3, 1.0, 3.0])
def test_products_are_the_integral(name: str, std: float) -> None:
    """By sums over a grid in two dimensions."""
    act, rho, step = ACTIVATIONS[name], 0.9, 0.05
    z = torch.arange(-8, 8 + step, step, dtype=torch.float64)
    density = torch.exp(-z * z / 2) * step / math.sqrt(2 * math.pi)
    other = act(std * (rho * z[:, None] + math.sqrt(1 - rho * rho) * z))
    expected = float((act(std * z) * density) @ (other @ density))
    C = std * std * torch.tensor([[[1.0, rho], [rho, 1.0]]], dtype=torch.float64)
    assert float(products(act, C)[0, 0, 1]) == pytest.approx(expected, rel=1e-3 if name == "relu" else 1e-5)


def test_what_all_terms_of_an_expansion_add_up_to() -> None:
    variance = torch.tensor([0.25, 1.0, 4.0], dtype=torch.float64)
    terms = expansion(torch.tanh, variance)
    assert torch.allclose(terms.coefficients.square().sum(-1), terms.square, rtol=1e-4)
    order = torch.arange(terms.coefficients.shape[-1])
    assert torch.allclose((order * terms.coefficients.square()).sum(-1), terms.slope, rtol=5e-3)


def test_uniform_attention_beside_skips_is_that_of_noci() -> None:
    """L branches of weight `1 / sqrt(L)`: exactly by hand, and `1 / (1 + e^-1 (1 / rho - 1))` for many layers."""
    layers, n, width = 16, 32, 64
    arch = Architecture(
        layers=layers, width=width, heads=1, kernel="uniform", mlp="none", norm="none", biases=False
    )  # fmt: skip
    net = Transformer.random(arch).with_remedy("sqrtl")
    tensors = {
        name: math.sqrt(1 / width) * tensor / tensor.square().mean().sqrt() if name.endswith("weight") else tensor
        for name, tensor in net.state_dict().items()
    }
    X = 0.8 * normal(1, 1, width, seed=0) + 0.6 * normal(1, n, width, seed=1)
    first, *_, last = mean_field(Transformer.from_weights(net.arch, tensors), X, draws=1)
    mean = float(first.covariance.mean()) * ((1 + 1 / layers) ** layers - 1)
    assert last.q == pytest.approx(first.q + mean)
    assert last.p == pytest.approx(first.p + mean)
    assert last.p / last.q == pytest.approx(1 / (1 + math.exp(-1) * (first.q / first.p - 1)), rel=0.03)


WITH: dict[str, list[tuple[str, str]]] = {
    "shaped": [("post", "shaped:alpha=0.7,beta=0.9,gamma=0.5")],
    "attnscale": [("post", "attnscale:w=0.5")],
    "centred": [("post", "centred")],
    "sinkhorn": [("pre", "sinkhorn:rounds=2")],
    "logn": [("post", "logn")],
    "differential": [("post", "differential")],
    "differential2": [("post", "differential2")],
    "rezero": [("pre", "rezero:weight=0.5,norms=1")],
    "skipinit": [("pre", "skipinit:weight=0.6")],
    "sqrtl": [("pre", "sqrtl")],
    "lnscale": [("pre", "lnscale")],
    "deepnorm": [("post", "deepnorm")],
    "lambda": [("post", "lambda")],
    "valueresidual": [("post", "valueresidual:a=0.8,b=0.9")],
    "neutreno": [("post", "neutreno")],
    "featscale": [("post", "featscale:s=0.3,t=-0.4")],
    "contranorm": [("pre", "contranorm:s=0.2"), ("post", "contranorm:s=0.2")],
    "gate": [("post", "gate")],
    "headgate": [("post", "headgate")],
}
"""Every remedy, with a norm place that it goes onto and numbers that are not those at which it changes nothing."""


def errors(place: Any, spec: str, seeds: int, width: int = 64, layers: int = 2, n: int = 8) -> dict[str, list[float]]:
    """Of q and p after every layer: theory over measured, less one; both are means over networks."""
    arch = Architecture(layers=layers, width=width, heads=4, mlp_width=width, mask="causal", norm_place=place)
    arch = Transformer.random(arch).with_remedy(spec).arch if spec else arch
    X = 0.6 * normal(1, 1, width, seed=0) + 0.8 * normal(1, n, width, seed=1)
    X = X - X.mean(-1, keepdim=True)
    measured: list[Tensor] = []
    theory: list[Tensor] = []
    for seed in range(seeds):
        net = Transformer.random(arch, seed=seed, init="xavier")
        measured.append(torch.stack([step.state[0] @ step.state[0].mT / width for step in net.steps(X)]))
        if seed < 8:
            theory.append(torch.stack([moments.covariance[0] for moments in mean_field(net, X, draws=8, seed=seed)]))
    both = [
        [Moments(layer, C[None]) for layer, C in enumerate(torch.stack(parts).mean(0))][1:]
        for parts in (theory, measured)
    ]
    pairs = list(zip(*both, strict=True))
    return {"q": [ours.q / other.q - 1 for ours, other in pairs], "p": [ours.p / other.p - 1 for ours, other in pairs]}


CASES = [case for cases in WITH.values() for case in cases]


def test_every_remedy_is_tried() -> None:
    assert set(WITH) == set(REMEDY_FILES)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("place", "spec"), CASES)
def test_a_remedy_has_a_rule(place: str, spec: str) -> None:
    found = errors(place, spec, seeds=8)
    assert max(map(abs, found["q"])) < 0.1 and max(map(abs, found["p"])) < 0.2, found


@pytest.mark.slow
@pytest.mark.parametrize(("place", "spec"), [("pre", ""), ("post", ""), *CASES])
def test_rules_of_remedies_are_those_of_networks(place: str, spec: str) -> None:
    found = errors(place, spec, seeds=200, layers=3)
    assert max(map(abs, found["q"])) < 0.03 and max(map(abs, found["p"])) < 0.05, found


def test_parts_without_a_rule_are_refused() -> None:
    class Doubled:
        name, place = "doubled", "stream"

        def plain(self, X: Tensor, block: Any, rules: Any, inside: Any) -> Tensor:
            return 2 * X

    own: Any = Doubled()
    net = Transformer.random(Architecture(layers=1, width=8, heads=2, parts=(own,)))
    with pytest.raises(ArchitectureError, match="no recursion for doubled here: measure instead"):
        list(mean_field(net, normal(1, 8, 8)))  # as many tokens as entries: shapes alone would not tell


@pytest.mark.parametrize("fields", [{"shared": True}, {"cross_attention": True}, {"positions": "disentangled"}])
def test_what_theory_does_not_cover_is_refused(fields: dict[str, Any]) -> None:
    net = Transformer.random(Architecture(**{"layers": 2, "width": 8, "heads": 2} | fields))
    with pytest.raises(ArchitectureError, match="measure instead"):
        list(mean_field(net, normal(1, 4, 8)))

"""Mixtures of experts in deviation arithmetic, against hundreds of digits."""

from typing import Any

import mpmath as mp
import pytest
import torch

from rankscope.deviation import propagate
from rankscope.nets import Architecture, Experts, Transformer
from rankscope.profiles import measure
from tests.builders import awake, normal
from tests.deviation.reference import DIGITS, SMALL, Network, compare, log10_residual

MIXTURES = {
    "renormalised": Experts(number=4, chosen=2, width=3, renormalised=True),
    "as scored": Experts(number=4, chosen=2, width=3),
    "one": Experts(number=3, chosen=1, width=3, dense_layers=(1,)),
    "shared": Experts(number=3, chosen=1, width=3, shared_width=4, shared_gate=True),
    "shared without a gate": Experts(number=3, chosen=3, width=3, shared_width=4),
    "sigmoids": Experts(number=4, chosen=2, width=3, sigmoid=True),
    "of groups": Experts(number=6, chosen=2, width=3, groups=3, groups_chosen=2),
    "deepseek": Experts(
        number=6,
        chosen=2,
        width=3,
        renormalised=True,
        sigmoid=True,
        correction=True,
        groups=3,
        groups_chosen=2,
        group_best=2,
        shared_width=4,
    ),
    "gpt-oss": Experts(number=4, chosen=2, width=3, renormalised=True, biases=True, limit=0.3),
}


NORMS = [("none", "post"), ("rms", "pre"), ("layer", "post")]
CASES = [(mixture, *NORMS[(k + shift) % 3]) for k, mixture in enumerate(MIXTURES) for shift in (0, 1)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("mixture", "norm", "place"), CASES)
def test_every_mixture_is_exact(mixture: str, norm: Any, place: Any) -> None:
    skip = 0.0 if norm == "rms" else 1.0
    arch = Architecture(
        **SMALL, norm=norm, norm_place=place, mlp="experts", experts=MIXTURES[mixture], attention_skip=skip,
        mlp_skip=skip, activation="silu",
    )  # fmt: skip
    compare(arch, seed=int(skip))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "mixture",
    ["renormalised", "as scored", "shared", "sigmoids", "deepseek", pytest.param("gpt-oss", marks=pytest.mark.slow)],
)
def test_collapse_through_experts_far_below_floating_point(mixture: str) -> None:
    """Without skips all tokens soon choose the same experts, and go on to differ by less and less."""
    arch = Architecture(
        **{**SMALL, "layers": 6}, norm="rms", norm_place="pre", mlp="experts", experts=MIXTURES[mixture],
        attention_skip=0.0, mlp_skip=0.0, activation="silu",
    )  # fmt: skip
    assert min(compare(arch, seed) for seed in range(2)) < -60


@pytest.mark.parametrize("renormalised", [True, False])
def test_equal_tokens_on_either_side_of_a_choice_come_apart(renormalised: bool) -> None:
    """Tokens 1e-9 apart that choose other experts are as far apart as experts are."""
    experts = Experts(number=2, chosen=1, width=3, renormalised=renormalised)
    arch = Architecture(layers=1, width=4, heads=1, norm="none", mlp="experts", experts=experts,
                        attention_skip=1.0, mlp_skip=0.0, biases=False)  # fmt: skip
    net = awake(arch)
    tensors = net.state_dict() | {"layers.0.attention.output.weight": torch.zeros(1, 4, 4, dtype=torch.float64)}
    tensors["layers.0.experts.router.weight"] = torch.tensor([[1.0, -1.0], *[[0.0, 0.0]] * 3]).double()
    net = Transformer.from_weights(arch, tensors)
    X = normal(1, 1, 4).expand(1, 3, 4).clone()
    X[0, :, 0] = torch.tensor([1e-9, -1e-9, 2e-9])
    found = measure(net, X, metrics=["residual", "expert_load"])
    with mp.workdps(DIGITS):
        true = log10_residual(Network(net).states(X[0])[1])
    assert float(found.curve("residual", "log10")[0, 1]) == pytest.approx(float(true), abs=1e-12)
    assert float(true) > -3 and float(found.curve("expert_load")[0, 1]) == pytest.approx(2 / 3)


@pytest.mark.parametrize("renormalised", [True, False])
@pytest.mark.parametrize("sigmoid", [True, False])
def test_an_expert_of_next_to_no_weight_beside_one_that_gives_nothing(renormalised: bool, sigmoid: bool) -> None:
    """Weights of e^-1500 in all: the expert that has nearly all the weight gives zero."""
    experts = Experts(number=2, chosen=2, width=3, renormalised=renormalised, sigmoid=sigmoid)
    arch = Architecture(layers=1, width=4, heads=1, norm="none", mlp="experts", experts=experts, activation="silu",
                        mlp_skip=0.0, biases=False)  # fmt: skip
    tensors = awake(arch).state_dict()
    tensors["layers.0.experts.router.weight"] = torch.tensor([[0.0, -1500.0], *[[0.0, 0.3]] * 3]).double()
    tensors["layers.0.experts.down.weight"][0] = 0.0
    tensors["layers.0.attention.output.weight"] *= 0.0
    net, X = Transformer.from_weights(arch, tensors), normal(1, 4, 4)
    X[0, :, 0] = torch.tensor([1.0, 1.0, 1.00001, 1.002])
    with mp.workdps(1500):
        true = log10_residual(Network(net).states(X[0])[1])
    found = measure(net, X, metrics=["residual", "expert_load"])
    assert float(found.curve("residual", "log10")[0, 1]) == pytest.approx(float(true), abs=1e-9)
    assert float(true) < -600 and not found.table["below_floor"].any() and float(found.curve("expert_load")[0, 1]) == 1


@pytest.mark.slow
def test_doubled_precision_confirms_a_mixture() -> None:
    arch = Architecture(**SMALL, norm="rms", norm_place="pre", mlp="experts", experts=MIXTURES["shared"],
                        attention_skip=0.0, mlp_skip=0.0, activation="silu")  # fmt: skip
    once, twice = (
        measure(awake(arch), normal(1, 4, 4), metrics=["mu", "expert_load"], confirm=sure).table
        for sure in (False, True)
    )
    assert twice["log10"].to_list() == pytest.approx(once["log10"].to_list(), abs=1e-12)
    assert not twice["below_floor"].any()


@pytest.mark.parametrize("mixture", MIXTURES)
def test_every_mixture_is_that_of_ordinary_tokens(mixture: str) -> None:
    """Of tokens that differ, in float64 alone, whose rules for experts are others."""
    arch = Architecture(**SMALL, norm="rms", mlp="experts", experts=MIXTURES[mixture], activation="silu")
    net, X = awake(arch), normal(2, 4, 4, seed=3)
    plain = [step.state for step in net.steps(X)]
    for fine, state in zip(propagate(net, X), plain, strict=True):
        torch.testing.assert_close(fine.state.tokens(), state, rtol=1e-11, atol=1e-12)

"""Scores of a state: a kernel is measured by its own rule, or in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rankscope.deviation import propagate
from rankscope.errors import ArchitectureError
from rankscope.nets import KERNELS, Architecture, Kernel, Transformer
from rankscope.nets.kernels import KernelContext, masked_softmax, scores
from rankscope.profiles import measure
from tests.builders import normal, thinned
from tests.deviation.reference import SMALL, compare
from tests.raising import raises


def twice(q: Tensor, k: Tensor, context: KernelContext) -> Tensor:
    return masked_softmax(2 * scores(q, k, context), context.visible)


def twice_deviation(operations: Any) -> Any:
    found = operations.products().scores()
    return operations.given(found.ref * 2.0, found.D * 2.0)


def network(kernel: str | Kernel) -> Transformer:
    arch = Architecture(layers=5, width=8, heads=2, norm="none", mlp="none", attention_skip=0, kernel=kernel)
    return Transformer.random(arch, seed=1, init="xavier")


def mu(kernel: str | Kernel, X: Tensor) -> tuple[Tensor, str]:
    profile = measure(network(kernel), X, metrics="relative_mu")
    return profile.curve("relative_mu", "log10")[0], profile.manifest.networks[0].arithmetic


def test_a_kernel_without_a_rule_is_measured_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an object, under the name of a built-in kernel, and where it is found by its name."""
    X = normal(1, 5, 8, seed=2)
    for own in (Kernel("twice", twice, averages=True), Kernel("softmax", twice, averages=True)):
        assert mu(own, X)[1] == "float64"
    monkeypatch.setitem(KERNELS, "softmax", Kernel("softmax", twice, averages=True))
    assert mu("softmax", X)[1] == "float64"
    with raises(ArchitectureError, subject="arithmetic"):
        next(propagate(network("softmax"), X))


def test_a_kernel_brings_its_deviation_rule_as_the_built_in_ones_do() -> None:
    """Softmax of twice the scores is softmax at half the divisor."""
    X = normal(1, 5, 8, seed=2)
    curve, arithmetic = mu(Kernel("twice", twice, averages=True, deviation=twice_deviation), X)
    net = network("softmax").variant(divisor=network("softmax").arch.divisor / 2)
    expected = measure(net, X, metrics="relative_mu").curve("relative_mu", "log10")[0]
    assert arithmetic == "deviation" and expected[-1] < -17
    torch.testing.assert_close(curve, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [name for name in KERNELS if name not in ("sinkhorn", "linformer", "sink")])
def test_built_in_kernels_may_be_given_as_objects(name: str) -> None:
    """Under any name, by the rules that they carry; of those left out two take a number, and one has weights."""
    X = normal(1, 5, 8, seed=2)
    one, other = mu(name, X), mu(replace(KERNELS[name], name="mine"), X)
    assert one[1] == other[1] == ("float64" if name == "sigmoid" else "deviation")
    assert torch.equal(one[0], other[0])


MASKS = ("complete", "causal", "window:1")
POSITIONS = ("none", "absolute", "relative", "rotary", "bias", "alibi")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("positions", "kernel", "skip"), thinned(POSITIONS, ("softmax", "gaussian"), (0.0, 1.0)))
def test_normed_queries_and_layers_without_a_norm(positions: Any, kernel: str, skip: float) -> None:
    """A norm on queries and keys, angles by layer, and a first layer that reads its input as it is."""
    seed = POSITIONS.index(positions)
    arch = Architecture(
        **SMALL, norm="rms", norm_place="pre", mask=MASKS[seed % 3], positions=positions, kernel=kernel,
        attention_skip=skip, query_norm=True, norm_eps=1e-6, bare_layers=(0, 2),
        rotary_frequencies=((1.0,), (0.01,)),
    )  # fmt: skip
    compare(arch, seed)


@pytest.mark.parametrize(("place", "skip"), [("output", 1.0), ("output", 0.0), ("pre", 0.0)])
def test_one_norm_of_all_heads_and_norms_of_what_branches_add(place: Any, skip: float) -> None:
    """OLMo 2; keys are shared by two heads of queries."""
    arch = Architecture(
        **SMALL, norm="rms", norm_place=place, query_norm=True, query_norm_across=True, key_heads=1, norm_eps=1e-6,
        attention_skip=skip, mlp_skip=skip, positions="rotary", mlp="gated", activation="silu",
    )  # fmt: skip
    compare(arch, seed=int(skip))


def test_a_rotation_with_a_scale_changes_lengths() -> None:
    """Which a gaussian kernel sees."""
    for seed, share in enumerate((1.0, 0.5)):
        arch = Architecture(**SMALL | {"head_width": 4}, norm="rms", kernel="gaussian", positions="rotary",
                            rotary_share=share, rotary_scales=(1.5, 0.6, 1.0))  # fmt: skip
        compare(arch, seed)

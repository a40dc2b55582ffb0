"""The tensors of a network by name: what `state` gives, `from_weights` takes, and nothing else."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from rankscope.errors import ArchitectureError, WeightsError
from rankscope.nets import Architecture, Transformer, shapes
from tests.builders import normal
from tests.raising import raises
from tests.strategies import architectures

BASE: dict[str, Any] = {"layers": 3, "width": 8, "heads": 2}


@given(architectures(), st.integers(0, 99))
def test_state_and_from_weights_are_inverse_for_variants_too(arch: Architecture, seed: int) -> None:
    net = Transformer.random(arch, seed=seed, init="xavier")
    for each in (net, net.variant(norm=False), net.variant(mlp=False, layers=5), net.variant(skip=0.3)):
        again = Transformer.from_weights(each.arch, each.state())
        assert torch.equal(again.run(normal(2, 5, 8, seed=0)).output, each.run(normal(2, 5, 8, seed=0)).output)
        assert again.fingerprint == each.fingerprint
        assert {name: tuple(tensor.shape) for name, tensor in each.state().items()} == shapes(each.arch)


def test_weights_that_do_not_fit_are_a_sentence() -> None:
    arch = Architecture(**BASE)
    good = Transformer.random(arch).state()
    name = "layers.1.attention.query.weight"
    with raises(WeightsError, subject="layers.1.attention.query.weight"):
        Transformer.from_weights(arch, {k: v for k, v in good.items() if k != name})
    with raises(WeightsError, subject="extra"):
        Transformer.from_weights(arch, {**good, "extra": torch.ones(1)})
    with raises(WeightsError, subject="layers.1.attention.query.weight"):
        Transformer.from_weights(arch, {**good, name: good[name].flatten(1)})
    with raises(WeightsError, subject="dtype"):
        Transformer.from_weights(arch, {**good, name: good[name].float()})
    with raises(ArchitectureError, subject="dtype"):
        Transformer.random(arch).to(torch.int64)
    with raises(ArchitectureError, subject="init"):
        Transformer.random(arch, init="xavir")

"""The tensors of a network by name: what `state_dict` gives, `from_weights` takes, and nothing else."""

import math
from typing import Any

import pytest
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
        again = Transformer.from_weights(each.arch, each.state_dict())
        assert torch.equal(again.run(normal(2, 5, 8, seed=0)).output, each.run(normal(2, 5, 8, seed=0)).output)
        assert again.fingerprint == each.fingerprint
        assert {name: tuple(tensor.shape) for name, tensor in each.state_dict().items()} == shapes(each.arch)


def test_weights_that_do_not_fit_are_a_sentence() -> None:
    arch = Architecture(**BASE)
    good = Transformer.random(arch).state_dict()
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


ARCH = Architecture(layers=4, width=64, heads=4, mlp_width=96)


def weight(init: str, name: str, arch: Architecture = ARCH) -> torch.Tensor:
    return Transformer.random(arch, init=init).state_dict()[f"layers.0.{name}.weight"].flatten()


@pytest.mark.parametrize("name", ["attention.query", "attention.value", "attention.output", "mlp.up"])
def test_bert_is_normal_with_deviation_one_fiftieth(name: str) -> None:
    w = weight("bert", name)
    assert w.std().item() == pytest.approx(0.02, rel=0.05)
    assert w.mean().item() == pytest.approx(0, abs=0.002)
    assert 0.06 < w.abs().max() < 0.12


@pytest.mark.parametrize(
    ("init", "name", "bound"),
    [
        ("xavier", "attention.query", math.sqrt(6 / 128)),
        ("xavier", "mlp.up", math.sqrt(6 / 160)),
        ("xavier", "mlp.down", math.sqrt(6 / 160)),
        ("kaiming", "attention.value", 1 / 8),
        ("kaiming", "attention.output", 1 / 8),
    ],
)
def test_uniform_schemes_fill_their_interval(init: str, name: str, bound: float) -> None:
    w = weight(init, name)
    assert 0.98 * bound < w.abs().max() <= bound
    assert w.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_kaiming_is_torchs_own_with_a_root_five() -> None:
    theirs = torch.empty(64, 64)
    torch.nn.init.kaiming_uniform_(theirs, a=math.sqrt(5))
    assert weight("kaiming", "attention.value").std().item() == pytest.approx(theirs.std().item(), rel=0.05)
    assert weight("kaiming", "attention.query").std().item() == pytest.approx(0.02, rel=0.05)


def test_orthogonal_values_make_an_orthogonal_map() -> None:
    net = Transformer.random(Architecture(layers=1, width=16, heads=1), init="orthogonal")
    w = net.weights.layers[0].attention
    W = w.value.weight[:, 0] @ w.output.weight[0]
    assert torch.allclose(W @ W.T, torch.eye(16, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("init", ["bert", "xavier", "kaiming", "orthogonal"])
def test_depth_scaling_divides_what_branches_add(init: str) -> None:
    for name in ("attention.output", "mlp.down"):
        assert torch.allclose(weight(f"{init}/sqrt(L)", name), weight(init, name) / 2)
    for name in ("attention.query", "attention.value", "mlp.up"):
        assert torch.equal(weight(f"{init}/sqrt(L)", name), weight(init, name))


def test_biases_start_at_zero_and_gains_at_one() -> None:
    state = Transformer.random(ARCH, init="xavier").state_dict()
    assert all(not tensor.any() for name, tensor in state.items() if name.endswith(".bias"))
    assert all(bool((tensor == 1).all()) for name, tensor in state.items() if name.endswith(".gain"))

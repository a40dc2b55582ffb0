"""Gates on heads: each is what its formula says, and starts as published."""

from typing import Any, cast

import pytest
import torch

from rankscope import decompose
from rankscope.errors import ArchitectureError, PathError
from rankscope.forecasts.mean_field import MeanField
from rankscope.nets import Architecture, PassSettings, Transformer
from tests.builders import normal
from tests.deviation.reference import Network, Rows, sigmoid
from tests.deviation.reference import times as multiplied
from tests.raising import raises
from tests.remedies.small_networks import check, check_digits, check_paths, small, stirred


class Gated(Network):
    """One gate a head; those of each entry the reference knows."""

    def spoken(self, here: int, X: Rows, source: Rows, found: list[Rows], kind: str = "attention") -> Rows:
        name = f"layers.{here}.parts.headgate"
        gates = multiplied(X, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))
        # P V times a gate of the row is (gate P) V.
        opened = [[[sigmoid(gates[i][h]) * p for p in row] for i, row in enumerate(P)] for h, P in enumerate(found)]
        return super().spoken(here, X, source, opened, kind)


def woken(net: Transformer) -> Transformer:
    """Gates that open and shut."""
    state = {
        name: tensor + normal(*tensor.shape, seed=place) if "gate." in name else tensor
        for place, (name, tensor) in enumerate(net.state_dict().items())
    }
    return Transformer.from_weights(net.arch, state)


@pytest.mark.parametrize(("mask", "biases"), [("complete", False), ("causal", True)])
@pytest.mark.parametrize(("name", "exact"), [("gate", Network), ("headgate", Gated)])
def test_they_are_their_formulas(name: str, exact: type[Network], mask: str, biases: bool) -> None:
    net = woken(stirred(small(norm_place="pre", mask=mask, biases=biases).with_remedy(name)))
    check(net, exact(net))


@pytest.mark.parametrize(("name", "exact"), [("gate", Network), ("headgate", Gated)])
def test_every_digit_of_pure_attention(name: str, exact: type[Network]) -> None:
    net = small(layers=4, mlp="none", norm="none", attention_skip=0.0, biases=False).with_remedy(name)
    check_digits(woken(net), exact(woken(net)), normal(1, 4, 4, seed=1))


@pytest.mark.parametrize("name", ["gate", "headgate"])
def test_they_start_half_open(name: str) -> None:
    """N(0, 0.02), each layer drawn for itself, biases 0; the rest of the network is as it was."""
    plain = Transformer.random(Architecture(layers=2, width=64, heads=4))
    net = plain.with_remedy(name)
    drawn = [tensor for key, tensor in net.state_dict().items() if key.endswith("gate.weight")]
    assert len(drawn) == 2 and not torch.equal(*drawn)
    for tensor in drawn:
        assert abs(float(tensor.std()) / 0.02 - 1) < 0.2
    assert not any(tensor.any() for key, tensor in net.state_dict().items() if key.endswith("gate.bias"))
    assert all(torch.equal(net.state_dict()[key], tensor) for key, tensor in plain.state_dict().items())


def test_a_gate_of_each_entry_alike_is_one_of_the_head() -> None:
    net, X = woken(small(norm_place="pre").with_remedy("headgate")), normal(2, 5, 4)
    state: dict[str, Any] = net.state_dict()
    for layer in range(3):
        for leaf in ("weight", "bias"):
            one = state.pop(f"layers.{layer}.parts.headgate.{leaf}")
            state[f"layers.{layer}.attention.gate.{leaf}"] = one[..., None].expand(*one.shape, 2).clone()
    each = Transformer.from_weights(net.arch.replace(parts=(), head_gate=True), state)
    torch.testing.assert_close(net.run(X).output, each.run(X).output, rtol=1e-13, atol=1e-14)


def test_paths_take_one_and_refuse_the_other() -> None:
    check_paths(woken(small(norm_place="pre").with_remedy("gate")))
    with raises(PathError, subject="headgate"):
        decompose(small().with_remedy("headgate"), normal(1, 5, 4))


def test_heads_have_one_gate() -> None:
    with raises(ArchitectureError, subject="head_gate"):
        small().with_remedy("gate").with_remedy("gate")


@pytest.mark.parametrize("name", ["gate", "headgate"])
def test_saved_and_read_back(name: str) -> None:
    net = small().with_remedy(name)
    assert Architecture.from_dict(net.arch.to_dict()) == net.arch
    assert Transformer.from_weights(net.arch, net.state_dict()).fingerprint == net.fingerprint


def test_covariances_are_those_of_gated_outputs() -> None:
    """`E (g_t y_t) (g_s y_s) = E[y_t y_s] E[g_t g_s]`, by drawing gates and outputs."""
    net = woken(small(norm_place="pre").with_remedy("headgate"))
    block, part = net.blocks[0], cast(Any, net.arch.parts[0])
    root = torch.tensor([[1.0, 0.0, 0.0], [0.6, 0.8, 0.0], [-0.3, 0.2, 0.9]], dtype=torch.float64)
    inside, heads = (root @ root.mT)[None], (root.mT @ root + 1.0)[None, None, None]
    settings = PassSettings.of(net.arch, net.weights, normal(1, 3, 4), torch.ones(1, 3, dtype=torch.bool))
    found = part.mean_field(heads, block, MeanField(net, settings, 1, torch.Generator()), inside)
    w = block.weights.parts["headgate"]
    logits = float(w["weight"].square().sum(0).mean()) * inside[0] + float(w["bias"].square().mean())
    drawn = torch.distributions.MultivariateNormal(torch.zeros(3, dtype=torch.float64), logits)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        gates = drawn.sample((200_000,)).sigmoid()
    expected = heads[0, 0, 0] * (gates[:, :, None] * gates[:, None, :]).mean(0)
    torch.testing.assert_close(found[0, 0, 0], expected, rtol=0.02, atol=0.01)

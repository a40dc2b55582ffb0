"""The forward pass in training: the plain one where nothing is dropped, and dropout where BERT has it."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from rankscope.nets import Architecture, Dropout, Transformer, training_states
from rankscope_studies.wu2024 import networks


def seeded(p: float, seed: int = 0) -> Dropout:
    return Dropout.seeded(p, seed, "cpu")


@pytest.mark.parametrize("variant", list(networks.VARIANTS))
@pytest.mark.parametrize("place", ["post", "pre"])
@pytest.mark.parametrize("padded", [None, "at the end", "anywhere"])
def test_without_dropout_training_is_the_plain_forward_pass(variant: str, place: str, padded: str | None) -> None:
    arch = Architecture(layers=3, width=12, heads=3, mask="causal", norm_place=place)  # type: ignore[arg-type]
    net = Transformer.random(arch, seed=1).variant(networks.VARIANTS[variant])
    X = torch.randn(2, 7, 12, dtype=torch.float64)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    if padded is not None:
        padding[1, 5:] = True
        padding[0, 2 if padded == "anywhere" else 6] = True
    hidden = None if padded is None else padding
    states = training_states(net, X, seeded(0.0), hidden)
    for plain, state in zip(net.run(X, hidden).states, states, strict=True):
        torch.testing.assert_close(state, plain, rtol=1e-12, atol=1e-12)


def test_dropout_drops_as_many_as_it_says_and_repeats_itself() -> None:
    net = Transformer.random(Architecture(layers=2, width=64, heads=4))
    X = torch.ones(4, 32, 64, dtype=torch.float64)
    once, again, other = (list(training_states(net, X, seeded(0.25, seed))) for seed in (3, 3, 4))
    assert torch.equal(once[-1], again[-1]) and not torch.equal(once[-1], other[-1])
    assert float((once[0] == 0).double().mean()) == pytest.approx(0.25, abs=0.02)
    assert float(once[0].max()) == pytest.approx(1 / 0.75)


def test_dropout_is_on_the_embedding_the_attention_and_what_heads_add() -> None:
    """Against the layer written out, with zeros drawn in the same order."""
    arch = Architecture(layers=2, width=8, heads=2, mlp="none", norm="layer", norm_place="post")
    net = Transformer.random(arch, seed=2)
    state = net.state_dict()
    X = torch.randn(3, 5, 8, dtype=torch.float64)
    draw = torch.Generator().manual_seed(6)

    def dropped(x: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(x.shape, generator=draw, dtype=x.dtype) >= 0.3
        return torch.where(kept, x / 0.7, torch.zeros_like(x))

    Y = dropped(X)
    expected = [Y]
    for layer in range(2):
        w = {name: state[f"layers.{layer}.attention.{name}.weight"] for name in
             ("query", "key", "value", "output")}  # fmt: skip
        q, k, v = (torch.einsum("bnd,dhe->bhne", Y, w[name]) for name in ("query", "key", "value"))
        P = dropped((q @ k.mT / 2).softmax(-1))  # the root of the width of a head, 4
        Y = F.layer_norm(Y + dropped(torch.einsum("bhne,hed->bnd", P @ v, w["output"])), (8,), eps=arch.norm_eps)
        expected.append(Y)
    for ours, theirs in zip(training_states(net, X, seeded(0.3, 6)), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "fields", [{"positions": "rotary"}, {"parallel": True}, {"norm_place": "sandwich", "key_heads": 1}]
)
def test_every_kind_of_network_can_be_trained_so(fields: dict[str, Any]) -> None:
    net = Transformer.random(Architecture(layers=2, width=8, heads=2, **fields), init="xavier")
    X = torch.randn(2, 5, 8, dtype=torch.float64)
    *_, still = training_states(net, X, seeded(0.0))
    torch.testing.assert_close(still, net.run(X).states[-1])
    *_, dropped = training_states(net, X, seeded(0.5))
    assert not torch.allclose(dropped, still)

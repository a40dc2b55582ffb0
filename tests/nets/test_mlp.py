"""Mixtures of experts as a part of an architecture."""

import json
from typing import Any

import pytest
import torch

from rankscope.errors import ArchitectureError, PathError
from rankscope.nets import Architecture, Experts, Transformer, shapes
from rankscope.paths import decompose
from rankscope.profiles import measure
from tests.builders import awake, normal
from tests.raising import raises

MIXTURE = Experts(number=4, chosen=2, width=5, shared_width=3, shared_gate=True, dense_layers=(1,))
ARCH = Architecture(layers=3, width=8, heads=2, mlp="experts", experts=MIXTURE, activation="silu")


def test_an_architecture_with_experts_survives_json() -> None:
    assert Architecture.from_dict(json.loads(json.dumps(ARCH.to_dict()))) == ARCH
    assert eval(repr(ARCH)) == ARCH


def test_only_layers_with_a_mixture_have_one() -> None:
    names = shapes(ARCH)
    assert names["layers.0.experts.up.weight"] == (8, 4, 5) and "layers.0.mlp.up.weight" not in names
    assert names["layers.1.mlp.gate.weight"] == (8, 32) and "layers.1.experts.up.weight" not in names
    net = awake(ARCH)
    assert Transformer.from_weights(ARCH, net.state()).fingerprint == net.fingerprint


def test_variants_keep_their_mixtures() -> None:
    net, X = awake(ARCH), normal(2, 4, 8)
    turned = net.variant(layers=[1, 0, 2, 1])
    assert turned.arch.experts is not None and turned.arch.experts.dense_layers == (0, 3)
    assert turned.run(X).output.shape == X.shape
    without = net.variant(mlp=False)
    assert not any("experts" in name for name in without.state()) and without.run(X).output.shape == X.shape


def test_one_expert_for_all_is_a_gated_mlp() -> None:
    """A mixture of one, renormalised, is the MLP it consists of."""
    arch = ARCH.replace(experts=Experts(number=1, chosen=1, width=32, renormalised=True))
    net = awake(arch)
    same = {"gate": lambda w: w[:, 0], "up": lambda w: w[:, 0], "down": lambda w: w[0]}
    tensors: dict[str, Any] = {}
    for name, tensor in net.state().items():
        part = name.split(".")[-2]
        if ".experts." not in name:
            tensors[name] = tensor
        elif part != "router":
            tensors[name.replace("experts", "mlp")] = same[part](tensor)
    biases = tuple(each for each in arch.biases if each != "mlp")  # type: ignore[union-attr]
    dense = arch.replace(mlp="gated", experts=None, biases=biases)
    X = normal(2, 5, 8)
    other = Transformer.from_weights(dense, tensors)
    torch.testing.assert_close(net.run(X).output, other.run(X).output, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("fields", "subject"),
    [
        ({"number": 2, "chosen": 3, "width": 4}, "chosen"),
        ({"number": 0, "chosen": 1, "width": 4}, "number"),
        ({"number": 2, "chosen": 1, "width": 4, "shared_gate": True}, "shared_gate"),
        ({"number": 4, "chosen": 1, "width": 4, "groups": 3}, "groups"),
        ({"number": 4, "chosen": 1, "width": 4, "groups": 2, "groups_chosen": 3}, "groups"),
        ({"number": 4, "chosen": 3, "width": 4, "groups": 2}, "group_best"),
        ({"number": 4, "chosen": 1, "width": 4, "limit": -1.0}, "limit"),
        ({"number": 4, "chosen": 1, "width": 4, "biases": True, "shared_width": 3}, "shared_width"),
    ],
)
def test_experts_that_cannot_be_are_a_sentence(fields: dict[str, Any], subject: str) -> None:
    with raises(ArchitectureError, subject=subject):
        Experts(**fields)


def test_an_architecture_must_say_its_experts() -> None:
    with raises(ArchitectureError, subject="experts"):
        Architecture(layers=1, width=8, heads=2, mlp="experts")
    with raises(ArchitectureError, subject="dense_layers"):
        Architecture(layers=1, width=8, heads=2, mlp="experts", experts=MIXTURE)
    with raises(ArchitectureError, subject="experts"):
        Architecture.from_dict({"layers": 1, "width": 8, "heads": 2, "experts": {"many": 3}})


def test_experts_with_biases_that_are_cut_off() -> None:
    """gpt-oss: each of the chosen experts written out, weighed by a softmax of the chosen alone."""
    experts = Experts(number=3, chosen=2, width=5, renormalised=True, biases=True, limit=0.3)
    arch = Architecture(
        layers=1, width=8, heads=2, norm="none", mlp="experts", experts=experts, activation="quick_gelu"
    )
    net, X = awake(arch), normal(1, 4, 8)
    w, before = net.weights.layers[0].experts, net.variant(mlp=False).run(X).output[0]
    assert w is not None and w.router.bias is not None and w.down.bias is not None
    assert w.gate.bias is not None and w.up.bias is not None
    for x, y in zip(before, net.run(X).output[0], strict=True):
        logits = x @ w.router.weight + w.router.bias
        best = sorted(range(3), key=lambda e: -float(logits[e]))[:2]
        shares, total = [float(logits[e].exp()) for e in best], x
        for e, share in zip(best, shares, strict=True):
            gate = (x @ w.gate.weight[:, e] + w.gate.bias[e]).clip(max=0.3)
            up = (x @ w.up.weight[:, e] + w.up.bias[e]).clip(-0.3, 0.3)
            hidden = gate / (1 + (-1.702 * gate).exp()) * (1 + up)
            total = total + share / sum(shares) * (hidden @ w.down.weight[e] + w.down.bias[e])
        torch.testing.assert_close(y, total, rtol=1e-12, atol=1e-13)
    assert measure(net, X).arithmetics == ["float64"]
    with raises(PathError, "experts"):
        decompose(net, X)

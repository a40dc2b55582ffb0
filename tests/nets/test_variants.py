from typing import Any

import pytest
import torch
from torch import Tensor

from rankscope.errors import ArchitectureError
from rankscope.nets import Architecture, Transformer
from rankscope.nets.norms import Norm
from tests.nets.conftest import BASE
from tests.raising import raises


def test_a_variant_of_nothing_is_the_same_network(net: Transformer, X: Tensor) -> None:
    assert net.variant().arch == net.arch
    assert torch.equal(net.variant().run(X).output, net.run(X).output)


@pytest.mark.parametrize("part", ["mlp", "norm"])
def test_none_takes_a_part_out_as_false_does(net: Transformer, X: Tensor, part: str) -> None:
    none: dict[str, Any] = {part: "none"}
    without = net.variant(**none)
    off: dict[str, Any] = {part: False}
    assert getattr(without.arch, part) == "none" and without.arch == net.variant(**off).arch
    assert net.variant("transformer", **none).arch == without.arch
    assert not torch.equal(without.run(X).output, net.run(X).output)


@pytest.mark.parametrize(("part", "own", "other"), [("mlp", "plain", "gated"), ("norm", "layer", "rms")])
def test_a_variant_has_weights_for_its_own_parts_alone(net: Transformer, part: str, own: str, other: str) -> None:
    same: dict[str, Any] = {part: own}
    assert net.variant(**same).arch == net.arch
    for choice in (other, "Layer"):
        with raises(ArchitectureError, subject=part):
            net.variant(**{**same, part: choice})
    with raises(ArchitectureError, subject=part):
        net.variant("san", **same)  # a name that takes the part out, and a choice that wants it


def test_a_norm_of_ones_own_is_its_own_choice() -> None:
    mine = Norm("largest", length=lambda x, eps: x.abs().amax(-1, keepdim=True) + eps)
    net = Transformer.random(Architecture(**BASE, norm=mine))
    assert net.variant(norm=mine).arch == net.variant(norm="largest").arch == net.arch
    assert net.variant(norm="none").arch.norm == "none"


def test_pure_attention_is_a_product_of_attention_matrices(net: Transformer, X: Tensor) -> None:
    """One head, no bias: SAN(X) = P_3 P_2 P_1 X W_1 W_2 W_3 (Dong et al., Thm 2.1)."""
    arch = Architecture(layers=3, width=8, heads=1, biases=False)
    san = Transformer.random(arch, init="xavier").variant("san")
    run = san.run(X, attention=True)
    expected = X
    for P, layer in zip(run.attention, san.weights.layers, strict=True):
        W = layer.attention.value.weight[:, 0] @ layer.attention.output.weight[0]
        expected = P[:, 0] @ expected @ W
    assert torch.allclose(run.output, expected, atol=1e-13)


def test_masks_and_heads_by_layer_follow_the_layers() -> None:
    net = Transformer.random(Architecture(**BASE, mask="complete;causal;window:1"))
    picked = net.variant(heads={2: [1]}).variant(layers=[2, 0])
    assert [picked.arch.mask_of(k) for k in range(2)] == ["window:1", "complete"]
    assert picked.arch.kept_heads == ((1,), (0, 1))


def test_what_is_named_along_with_layers_describes_the_new_depth(net: Transformer) -> None:
    deep = net.variant(layers=[0] * 4, mask="complete;window:1", heads={3: [0]})
    assert [deep.arch.mask_of(k) for k in range(4)] == ["complete", "window:1"] * 2
    assert deep.arch.kept_heads == ((0, 1),) * 3 + ((0,),)


def test_heads_that_are_silenced_say_nothing(net: Transformer, X: Tensor) -> None:
    """The branch of a layer is the sum of what its heads say alone, plus its bias."""
    one = net.variant(layers=1, mlp=False, norm=False, skip=0.0)
    both = one.run(X).output
    alone = [one.variant(heads=[h]).run(X).output for h in range(2)]
    none = one.variant(heads=[]).run(X).output
    assert torch.allclose(alone[0] + alone[1] - none, both, atol=1e-13)
    assert not torch.allclose(alone[0], both)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("san", {"attention_skip": 0.0, "mlp": "none", "norm": "none"}),
        ("san+skip", {"attention_skip": 0.5, "mlp": "none", "norm": "none"}),
        ("san+mlp", {"attention_skip": 0.0, "mlp_skip": 0.0, "mlp": "plain", "norm": "none"}),
        ("san+norm+mlp+mlp_skip", {"attention_skip": 0.0, "mlp_skip": 0.7, "mlp": "plain", "norm": "layer"}),
        ("san+norm+skip", {"attention_skip": 0.5, "mlp": "none", "norm": "layer"}),
        ("san+attention_skip+mlp", {"attention_skip": 0.5, "mlp_skip": 0.0, "mlp": "plain", "norm": "none"}),
        ("san+skip+mlp+norm", {"attention_skip": 0.5, "mlp_skip": 0.7, "mlp": "plain", "norm": "layer"}),
    ],
)
def test_names_say_what_stays(name: str, expected: dict[str, Any]) -> None:
    net = Transformer.random(Architecture(**BASE, attention_skip=0.5, mlp_skip=0.7))
    arch = net.variant(name).arch.to_dict()
    assert {field: arch[field] for field in expected} == expected


def test_every_part_put_back_is_the_network(net: Transformer, X: Tensor) -> None:
    assert torch.equal(net.variant("san+skip+mlp+norm").run(X).output, net.run(X).output)


@pytest.mark.parametrize(
    ("change", "subject"),
    [
        ({"layers": 0}, "layers"),
        ({"layers": [3]}, "layers"),
        ({"layers": []}, "layers"),
        ({"heads": [2]}, "kept_heads"),
        ({"heads": {3: [0]}}, "heads"),
        ({"kernel": "linformer:2"}, "kernel"),
        ({"divisor": -2.0}, "divisor"),
    ],
)
def test_a_bad_variant_is_a_sentence(net: Transformer, change: dict[str, Any], subject: str) -> None:
    with raises(ArchitectureError, subject=subject):
        net.variant(**change)


@pytest.mark.parametrize("name", ["sna", "transformer+skip", "san+skp"])
def test_a_bad_name_is_a_sentence(net: Transformer, name: str) -> None:
    with raises(ArchitectureError, subject="variant"):
        net.variant(name)

"""A block is its skips, branches and norms in the order that its architecture says."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rankscope.errors import ArchitectureError
from rankscope.nets import Architecture, PassSettings, Plain, Transformer, normalise, traverse
from rankscope.nets.fields import NormPlace
from rankscope.nets.traversal import norms, order
from tests.nets.conftest import BASE
from tests.raising import raises

CROSS: dict[str, Any] = {"layers": 2, "width": 8, "heads": 2, "cross_attention": True}


@pytest.mark.parametrize("place", ["pre", "post", "sandwich", "output"])
@pytest.mark.parametrize("weight", [0.0, 0.4, 1.0])
def test_a_skip_weighs_what_it_is_told(X: Tensor, place: NormPlace, weight: float) -> None:
    """Without MLP: X' = weight X + branch, the branch the same whatever the weight."""
    arch = Architecture(**{**BASE, "layers": 1}, norm_place=place, mlp="none")
    net = Transformer.random(arch, init="xavier")
    branch = net.variant(skip=0.0, norm=place != "post").run(X).states[1]
    combined = weight * X + branch
    if place == "post":
        combined = normalise(combined, arch.norm, net.weights.layers[0].attention_norm, arch.norm_eps)
    assert torch.allclose(net.variant(skip=weight).run(X).states[1], combined, atol=1e-13)


def test_taking_the_mlp_out_takes_its_skip_and_norm(net: Transformer, X: Tensor) -> None:
    """LN(X + attention(X)) is all that is left of a BERT layer."""
    layer = net.weights.layers[0]
    left = net.variant(mlp=False, layers=1)
    with_mlp = net.variant(layers=1)
    rules = Plain(left.arch, PassSettings.of(left.arch, left.weights, X, torch.ones(2, 5, dtype=torch.bool)))
    block = left.blocks[0]
    heads = rules.mix(block, rules.pattern(block, X), rules.values(block, X))
    Y = X + rules.output(block, heads)
    expected = torch.nn.functional.layer_norm(Y, (8,), layer.attention_norm.gain, layer.attention_norm.bias)
    assert torch.allclose(left.run(X).output, expected, atol=1e-9)
    assert not torch.allclose(with_mlp.run(X).output, expected)
    assert torch.equal(traverse(block, rules, X).state, left.run(X).output)


def test_parallel_blocks_have_one_skip(X: Tensor) -> None:
    net = Transformer.random(Architecture(**BASE, parallel=True, norm_place="pre"), init="xavier")
    bare = net.variant(skip=0.0, layers=1)
    assert torch.allclose(net.variant(layers=1).run(X).output, X + bare.run(X).output, atol=1e-13)
    with raises(ArchitectureError, subject="mlp_skip"):
        net.variant(mlp_skip=0.5)


def test_the_third_half_has_norms_of_its_own_kind() -> None:
    for place, expected in (
        ("post", ["attention_norm", "cross_norm", "mlp_norm"]),
        ("pre", ["attention_norm", "cross_norm", "mlp_norm"]),
        ("output", ["attention_after", "cross_after", "mlp_after"]),
        ("sandwich", [f"{part}_{end}" for part in ("attention", "cross", "mlp") for end in ("norm", "after")]),
    ):
        assert norms(Architecture(**{**CROSS, "norm_place": place})) == expected
    bare = Architecture(**CROSS, mlp="none", attention_skip=0.5)
    assert [(half.skip, half.branches[0].part) for half in order(bare)] == [(0.5, "attention"), (0.5, "cross")]


def test_a_bare_layer_attends_to_what_enters_it_and_keeps_its_other_norms() -> None:
    for place, expected in (
        ("pre", ["cross_norm", "mlp_norm"]),
        ("sandwich", ["attention_after", "cross_norm", "cross_after", "mlp_norm", "mlp_after"]),
    ):
        arch = Architecture(**{**CROSS, "norm_place": place, "bare_layers": (1,)})
        assert norms(arch, 1) == expected
        assert len(norms(arch, 0)) == len(expected) + 1 and "attention_norm" in norms(arch, 0)

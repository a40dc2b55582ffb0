from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rankscope.errors import ArchitectureError
from rankscope.nets import Architecture, Transformer
from rankscope.nets.fields import NormPlace
from rankscope.nets.norms import normalise
from rankscope.nets.pass_settings import PassSettings
from rankscope.nets.plain import Plain
from rankscope.nets.traversal import traverse
from tests.raising import raises
from tests.strategies import architectures

BASE: dict[str, Any] = {"layers": 3, "width": 8, "heads": 2}


@pytest.fixture
def net() -> Transformer:
    return Transformer.random(Architecture(**BASE), seed=1, init="xavier")


@pytest.fixture
def X() -> Tensor:
    return torch.randn(2, 5, 8, dtype=torch.float64)


@given(architectures(), st.integers(0, 9))
def test_variants_share_every_tensor(arch: Architecture, seed: int) -> None:
    net = Transformer.random(arch, seed=seed)
    mine = {tensor.data_ptr() for tensor in net.state().values()}
    for each in (
        net.variant(skip=False, mlp=False, norm=False),
        net.variant(mask="window:1", divisor=2.0, heads=[0]),
        net.variant(layers=7),
    ):
        assert {tensor.data_ptr() for tensor in each.state().values()} <= mine


def test_a_variant_of_nothing_is_the_same_network(net: Transformer, X: Tensor) -> None:
    assert net.variant().arch == net.arch
    assert torch.equal(net.variant().run(X).output, net.run(X).output)


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


@pytest.mark.parametrize("place", ["pre", "post", "sandwich"])
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


def test_layers_repeat_and_reorder(net: Transformer, X: Tensor) -> None:
    deep = net.variant(layers=8)
    assert [id(layer) for layer in deep.weights.layers] == [id(net.weights.layers[k % 3]) for k in range(8)]
    first = net.variant(layers=[0])
    state = X
    for _ in range(4):
        state = first.run(state).output
    assert torch.allclose(net.variant(layers=[0] * 4).run(X).output, state, atol=1e-12)
    assert net.variant(layers=2).arch.layers == 2


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


def test_parallel_blocks_have_one_skip(X: Tensor) -> None:
    net = Transformer.random(Architecture(**BASE, parallel=True, norm_place="pre"), init="xavier")
    bare = net.variant(skip=0.0, layers=1)
    assert torch.allclose(net.variant(layers=1).run(X).output, X + bare.run(X).output, atol=1e-13)
    with raises(ArchitectureError, subject="mlp_skip"):
        net.variant(mlp_skip=0.5)


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

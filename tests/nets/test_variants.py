from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from rankscope.errors import ArchitectureError
from rankscope.nets import Architecture, Experts, Norm, Transformer
from rankscope.remedies import REMEDY_FILES
from tests.builders import awake, normal
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
    picked = net.variant(heads={3: [1]}).variant(layers=[3, 1])
    assert [picked.arch.mask_of(k) for k in range(2)] == ["window:1", "complete"]
    assert picked.arch.kept_heads == ((1,), (0, 1))


def test_what_is_named_along_with_layers_describes_the_new_depth(net: Transformer) -> None:
    deep = net.variant(layers=[1] * 4, mask="complete;window:1", heads={4: [0]})
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
        ({"layers": [4]}, "layers"),
        ({"layers": [0]}, "layers"),
        ({"layers": []}, "layers"),
        ({"heads": [2]}, "kept_heads"),
        ({"heads": {4: [0]}}, "heads"),
        ({"heads": {0: [0]}}, "heads"),
        ({"layer": 2}, "variant"),
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


SHAPES: dict[str, dict[str, Any]] = {
    "post-norm": {},
    "pre-norm, rotary angles by layer": {
        "norm_place": "pre", "final_norm": True, "positions": "rotary", "rotary_scales": (1.0, 0.7, 1.3),
        "rotary_frequencies": ((1.0,), (0.3,)),
    },
    "parallel, alibi": {"parallel": True, "norm_place": "pre", "positions": "alibi", "mask": "causal"},
    "sandwich, masks by layer": {"norm_place": "sandwich", "mask": "causal;window:1;complete"},
    "relative positions": {"positions": "relative"},
    "position biases": {"positions": "bias", "bias_buckets": 4, "norm_place": "pre"},
    "disentangled positions": {"positions": "disentangled", "bias_buckets": 4, "bias_reach": 1},
    "absolute positions": {"positions": "absolute", "length": 8},
    "grouped keys": {"key_heads": 2, "norm": "rms", "norm_place": "pre"},
    "one key": {"key_heads": 1},
    "gates and sinks": {"head_gate": True, "kernel": "sink"},
    "norms of queries": {"query_norm": True},
    "one norm of all queries": {"query_norm": True, "query_norm_across": True},
    "latents": {"query_latent": 4, "key_latent": 4, "positions": "rotary"},
    "wide values, weighted skips": {"value_width": 3, "attention_skip": 0.5, "mlp_skip": 0.3},
    "bare first layer": {"norm_place": "pre", "bare_layers": (0,)},
    "experts, two dense layers": {
        "mlp": "experts", "experts": Experts(number=3, chosen=2, width=4, dense_layers=(0, 2)), "norm": "rms",
    },
    "shared": {"shared": True},
}  # fmt: skip


def made(name: str) -> Transformer:
    """A random network of 4 layers and 4 heads."""
    return awake(Architecture(layers=4, width=8, heads=4, **SHAPES[name]), seed=3)


def stepped(net: Transformer, X: Tensor, layers: set[int]) -> Tensor:
    """The output, each of these layers (from 1) of the whole network passed by, the others run one at a time."""
    from rankscope.nets import Plain, traverse

    X, valid, _ = net.prepared(X, None)
    rules = Plain(net.arch, net.settings(X, valid))
    for block in net.blocks:
        X = X if block.index + 1 in layers else traverse(block, rules, X).state
    return net.finish(X)


def with_zero_outputs(net: Transformer, heads: dict[int, list[int]]) -> Transformer:
    """The network with zeros in the output weights of these heads (layers from 1), and nothing else changed."""
    tensors = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    for layer, chosen in heads.items():
        tensors[f"layers.{0 if net.arch.shared else layer - 1}.attention.output.weight"][chosen] = 0
    return Transformer.from_weights(net.arch, tensors)


@pytest.mark.parametrize("name", SHAPES)
def test_layers_that_stay_compute_as_before(name: str) -> None:
    net, X = made(name), normal(2, 6, 8)
    for layers in ({1}, {2, 4}, {1, 2, 3}):
        cut = net.without(layers=layers)
        assert cut.arch.layers == 4 - len(layers) and len(cut.weights.layers) == cut.arch.layers
        torch.testing.assert_close(cut.run(X).output, stepped(net, X, layers), rtol=1e-13, atol=1e-13)
        again = Transformer.from_weights(cut.arch, cut.state_dict())  # what is written is what is run
        assert torch.equal(again.run(X).output, cut.run(X).output)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    "heads",
    [{1: [0], 2: [3], 3: [1], 4: [2]}, {k: [2, 3] for k in range(1, 5)}, {2: [0, 1, 2, 3]}, {1: [0], 3: [1, 2]}],
    ids=["another head each", "the same two", "a whole layer's", "unequal"],
)
def test_heads_that_go_give_zero_and_nothing_else_changes(name: str, heads: dict[int, list[int]]) -> None:
    net, X = made(name), normal(2, 6, 8)
    if net.arch.shared:
        heads = {k: heads.get(1, [1]) for k in range(1, 5)}
    cut = net.without(heads=heads)
    expected = with_zero_outputs(net, heads).run(X).output
    torch.testing.assert_close(cut.run(X).output, expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(expected, net.run(X).output)
    pairs = [(layer, head) for layer, chosen in heads.items() for head in chosen]
    assert torch.equal(net.without(heads=pairs).run(X).output, cut.run(X).output)


def test_heads_are_removed_for_real_where_the_architecture_can_hold_the_rest() -> None:
    """Equally many of every layer; of shared keys, all heads that share one, or as many of each."""
    each = range(1, 5)

    def sizes(name: str, heads: dict[int, list[int]], **more: Any) -> tuple[int, int] | None:
        arch = made(name).without(heads=heads, **more).arch
        return None if arch.kept_heads is not None else (arch.heads, arch.key_heads)

    assert sizes("post-norm", {1: [0], 2: [3], 3: [1], 4: [2]}) == (3, 3)
    assert sizes("post-norm", {1: [0], 2: [1]}) is None
    assert sizes("post-norm", {1: [0], 2: [1]}, layers=[3, 4]) == (3, 3)
    assert sizes("grouped keys", {1: [0, 1], 2: [2, 3], 3: [0, 1], 4: [0, 1]}) == (2, 1)
    assert sizes("grouped keys", {k: [1, 2] for k in each}) == (2, 2)
    assert sizes("grouped keys", {k: [0] for k in each}) is None
    assert sizes("one key", {k: [k - 1] for k in each}) == (3, 1)
    assert sizes("position biases", {k: [1] for k in each}) == (3, 3)
    assert sizes("position biases", {k: [k - 1] for k in each}) is None  # one table for all layers
    assert sizes("parallel, alibi", {k: [1] for k in each}) is None
    assert sizes("one norm of all queries", {k: [1] for k in each}) is None
    narrow, whole = made("post-norm").without(heads={k: [0, 1] for k in each}), made("post-norm")
    count = sum(tensor.numel() for tensor in narrow.state_dict().values())
    assert count == sum(tensor.numel() for tensor in whole.state_dict().values()) - 4 * (2 * (3 * (8 + 1) + 8) * 2)
    assert (narrow.arch.head_width, narrow.arch.divisor) == (whole.arch.head_width, whole.arch.divisor)


def test_layers_and_heads_go_together_by_the_numbers_of_the_whole() -> None:
    net, X = made("sandwich, masks by layer"), normal(1, 5, 8)
    heads = {1: [0], 2: [1], 4: [3]}
    cut = net.without(layers=[2], heads=heads)
    expected = stepped(with_zero_outputs(net, heads), X, {2})
    torch.testing.assert_close(cut.run(X).output, expected, rtol=1e-12, atol=1e-12)


def test_what_was_silent_before_stays_so() -> None:
    net, X = made("post-norm"), normal(1, 5, 8)
    before = net.variant(heads={1: [1, 2, 3]})
    cut = before.without(heads=[(2, 0), (3, 0), (4, 0)])
    assert cut.arch.heads == 3 and cut.arch.kept_heads is None
    expected = with_zero_outputs(net, {k: [0] for k in range(1, 5)}).run(X).output
    torch.testing.assert_close(cut.run(X).output, expected, rtol=1e-12, atol=1e-12)
    assert before.without(layers=[1]).arch.kept_heads == ((0, 1, 2, 3),) * 3


def test_nothing_taken_out_is_the_same_network() -> None:
    net = made("post-norm")
    assert net.without().fingerprint == net.fingerprint
    assert net.without(layers=[1]).weights.layers[0] is net.weights.layers[1]  # shared, not copied


def test_cross_attention_keeps_all_its_heads() -> None:
    arch = Architecture(layers=3, width=8, heads=4, cross_attention=True, mask="causal")
    net, X = awake(arch).with_memory(normal(1, 7, 8, seed=1)), normal(2, 5, 8)
    heads = {k: [1] for k in range(1, 4)}
    cut = net.without(heads=heads)
    expected = with_zero_outputs(net, heads).with_memory(normal(1, 7, 8, seed=1)).run(X).output
    assert cut.arch.heads == 4
    torch.testing.assert_close(cut.run(X).output, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("remedy", REMEDY_FILES)
def test_remedies_act_in_what_is_left_as_before_or_refuse(remedy: str) -> None:
    arch = Architecture(layers=4, width=8, heads=2, norm_place="post" if remedy == "deepnorm" else "pre")
    net, X = awake(arch).with_remedy(remedy), normal(1, 5, 8)
    layers = {2, 3}
    try:
        cut = net.without(layers=layers)
    except ArchitectureError as error:
        assert error.subject in [part.name for part in net.arch.parts]
        assert remedy in ("sqrtl", "lnscale", "differential", "valueresidual", "neutreno")
    else:
        torch.testing.assert_close(cut.run(X).output, stepped(net, X, layers), rtol=1e-12, atol=1e-12)


def test_a_part_that_acts_on_outputs_of_heads_keeps_them_all() -> None:
    net = Transformer.random(Architecture(layers=2, width=8, heads=2)).with_remedy("neutreno")
    with raises(ArchitectureError, "neutreno"):
        net.without(heads={1: [0]})


@dataclass(frozen=True)
class Numbered:
    """A part of one's own that says that it acts by the number of the layer."""

    name: str = "numbered"
    place: str = "stream"
    by_number: bool = True

    def plain(self, x: Any, block: Any, rules: Any, inside: Any) -> Any:
        return x * (block.index + 1)


def test_a_part_of_ones_own_that_acts_by_number_keeps_all_layers() -> None:
    net = Transformer.random(Architecture(layers=2, width=8, heads=2, parts=(Numbered(),)))  # type: ignore[arg-type]
    with raises(ArchitectureError, "numbered"):
        net.without(layers=[1])
    assert net.without(heads={1: [0]}).arch.kept_heads == ((1,), (0, 1))


@pytest.mark.parametrize(
    ("wrong", "subject"),
    [
        ({"layers": [0]}, "layers"),
        ({"layers": [5]}, "layers"),
        ({"layers": 3}, "layers"),
        ({"layers": "34"}, "layers"),
        ({"layers": [True]}, "layers"),
        ({"layers": [[1]]}, "layers"),
        ({"layers": [1, 2, 3, 4]}, "layers"),
        ({"heads": [0]}, "heads"),
        ({"heads": 2}, "heads"),
        ({"heads": "12"}, "heads"),
        ({"heads": {1: 0}}, "heads"),
        ({"heads": {0: [1]}}, "heads"),
        ({"heads": {1: [4]}}, "heads"),
        ({"heads": [(1, -1)]}, "heads"),
    ],
)
def test_what_cannot_be_taken_out_is_a_sentence(wrong: dict[str, Any], subject: str) -> None:
    with raises(ArchitectureError, subject):
        made("post-norm").without(**wrong)

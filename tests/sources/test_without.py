"""Layers and heads taken out of networks, held against transformers' own models with the same taken out by hooks.

A layer is taken out of the original by a hook that gives back the input of its block: everything else, as masks and
tables by the number of a layer, stays that of the whole model. A head is taken out by a hook that sets its outputs to
zero before the output projection."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch

from rankscope.nets import Transformer
from rankscope.sources import FAMILIES, Family, lifted, load
from rankscope.sources.parity import ParityInputs, distance, original
from tests.sources.models import DECODERS, FIRST_QUICK, model_of

FUSED = ("xlnet",)  # its output projection is a tensor of its own, which no hook reaches


def _passed_by(layers: set[int]) -> tuple[Callable[..., None], Callable[..., Any]]:
    """Hooks before and after blocks, by which those with these numbers (from 1) give back what they were given."""
    entered: list[Any] = []

    def before(module: Any, args: Any, kwargs: Any) -> None:
        entered.append(args[0] if args else kwargs.get("hidden_states", kwargs.get("output_h")))

    def after(module: Any, args: Any, output: Any) -> Any:
        if len(entered) not in layers:
            return None
        return (entered[-1], *output[1:]) if isinstance(output, tuple) else entered[-1]

    return before, after


def _off(net: Transformer, cut: Transformer, family: Family, core: Any, layers: set[int]) -> float:
    """The largest relative difference of the cut network from the hooked original."""
    inputs = ParityInputs.of(family, core, net.origin.embedding, net.arch)  # type: ignore[union-attr]
    X, padding = net.origin.embedding.embed(inputs.inputs, inputs.padding)  # type: ignore[union-attr]
    before, after = _passed_by(layers)
    for block in dict.fromkeys(family.blocks(core)):
        block.register_forward_pre_hook(before, with_kwargs=True)
        block.register_forward_hook(after)
    with lifted():
        theirs = original(family, core, inputs.arguments(family), attention=False)
    assert len(theirs.states) == net.arch.layers + 1
    left = [state for layer, state in enumerate(theirs.states) if layer not in layers]
    mine = inputs.attach_memory(cut).run(X, padding)
    object.__setattr__(theirs, "states", left)
    return distance(mine, theirs, ~padding, family.output(core), family.name)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("first", [True, False], ids=["the first", "all but the first"])
@pytest.mark.parametrize(("name", "label"), [*FIRST_QUICK, *DECODERS])
def test_a_network_without_layers_is_the_original_whose_blocks_pass_tokens_by(
    name: str, label: str, first: bool
) -> None:
    model, family = model_of(name, label), FAMILIES[name]
    net = load(model, family=name)
    layers = {1} if first else set(range(2, net.arch.layers + 1))
    cut = net.without(layers=layers)
    assert cut.arch.layers == net.arch.layers - len(layers)
    assert _off(net, cut, family, family.core(model), layers) < 1e-10


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("name", "label"), FIRST_QUICK)
def test_a_network_without_heads_is_the_original_whose_heads_are_zero_before_their_output(
    name: str, label: str
) -> None:
    """Different heads in different layers: the last head of layer 1, and the first of layer 3, which also loses
    layer 2. What is left may be narrower, or have silent heads: it must compute the same."""
    model, family = model_of(name, label), FAMILIES[name]
    if name in FUSED:
        pytest.skip("no hook reaches what heads give")
    net, core = load(model, family=name), family.core(model)
    out = {1: net.arch.heads - 1, 3: 0}
    blocks, path = family.blocks(core), dict(family.parts)["attention.output"]
    if len(set(blocks)) < len(blocks):
        out = dict.fromkeys(range(1, net.arch.layers + 1), 0)  # layers that share their weights share the hook
    for layer, head in out.items():
        start = head * net.arch.value_width

        def silenced(module: Any, args: Any, start: int = start) -> Any:
            changed = args[0].clone()
            changed[..., start : start + net.arch.value_width] = 0
            return (changed, *args[1:])

        attrgetter(path)(blocks[layer - 1]).register_forward_pre_hook(silenced)
    cut = net.without(layers=[2], heads=list(out.items()))
    assert cut.arch.heads < net.arch.heads or cut.arch.kept_heads is not None
    assert _off(net, cut, family, core, {2}) < 1e-10


def test_heads_are_removed_for_real_where_the_rest_is_a_network() -> None:
    net = load(model_of("llama", "mistral"))
    group = net.arch.heads // net.arch.key_heads
    assert group > 1
    whole = net.without(heads={layer: range(group) for layer in range(1, net.arch.layers + 1)})
    assert (whole.arch.heads, whole.arch.key_heads) == (net.arch.heads - group, net.arch.key_heads - 1)
    assert torch.equal(
        whole.state_dict()["layers.0.attention.key.weight"], net.state_dict()["layers.0.attention.key.weight"][:, 1:]
    )

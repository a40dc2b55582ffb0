"""A model in memory on one batch, as it is now: its canonical network, and the batch as tokens of layer 0.

`load` holds the two against each other on a probe of its own. Here the batch itself is held against as well:
what a batch says otherwise than the canonical network takes it (positions, segments, who sees whom) is found.
"""

from collections.abc import Mapping
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rankscope.errors import ParityError, TokensError
from rankscope.nets import Transformer
from rankscope.shapes import Bool, Float
from rankscope.sources.canonical import canonical
from rankscope.sources.load import built_as, in_memory
from rankscope.sources.parity import TOLERANCE, check, distance, lifted, original


class Running(NamedTuple):
    """In float64 on the CPU."""

    net: Transformer
    X: Float[Tensor, "batch token width"]
    padding: Bool[Tensor, "batch token"]


@torch.no_grad()
def running(model: nn.Module, batch: Mapping[str, Any]) -> Running:
    """`batch` holds what the model is called with, by name; padding is where its `attention_mask` is 0. The
    model is left as it is."""
    checkpoint, name = in_memory(model), type(model).__name__
    family = checkpoint.family
    with built_as(family, name):
        net, embedding = canonical(checkpoint, name)
        core = checkpoint.core
        check(net, family, core, embedding, name)
        taken = signature(core.forward).parameters
        given = {key: _wide(value) for key, value in batch.items() if key in taken and key not in OF_THE_CALL}
        with lifted():
            theirs = original(family, core, given, attention=False)
        if family.side == "decoder":
            net = _reading(net, given, name)
    X = theirs.states[0]
    padding = _padding(given.get("attention_mask"), X)
    X = X.masked_fill(padding[..., None], 0.0)
    off = distance(net.run(X, padding), theirs, ~padding, family.output(core), name)
    if not off <= TOLERANCE:
        raise ParityError(
            f"the canonical network must agree with {name} on this batch within {TOLERANCE:g}; it is off by "
            f"{off:.1e}: it takes one of {', '.join(given)} otherwise (position_ids, as one, must count real "
            "tokens one by one)"
        )
    return Running(net, X, padding)


OF_THE_CALL = ("use_cache", "output_attentions", "output_hidden_states", "return_dict")
"""Arguments that say what is given back, not what is computed."""


def _reading(net: Transformer, given: Mapping[str, Any], name: str) -> Transformer:
    """The network with the memory of this batch."""
    memory, mask = given.get("encoder_hidden_states"), given.get("encoder_attention_mask")
    if not isinstance(memory, Tensor):
        raise TokensError(f"{name} reads a memory; the batch must hold encoder_hidden_states, and has none")
    return net.with_memory(memory, None if mask is None else mask == 0)


def _padding(mask: Any, X: Tensor) -> Tensor:
    if mask is None:
        return torch.zeros(X.shape[:2], dtype=torch.bool)
    if not isinstance(mask, Tensor) or mask.shape != X.shape[:2]:
        came = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise TokensError(
            f"attention_mask must be [batch, token] {tuple(X.shape[:2])}, 0 at padding; received {came}"
        )
    padding = mask == 0
    if bool(padding.all(-1).any()):
        raise TokensError("every sample must have at least one real token; one has none: leave it out")
    return padding


def _wide(value: Any) -> Any:
    """On the CPU, as a model in float64 takes it."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().to("cpu", torch.float64 if value.is_floating_point() else None)

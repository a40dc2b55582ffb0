"""The canonical network of a model in memory, and one batch of the model as tokens of layer 0.

Called by the monitor to decompose a model during training. `load` compares network and model on inputs of
its own; here they are also compared on the batch itself, so that a batch whose positions, segments or mask
the canonical network would read differently is refused.
"""

from collections.abc import Mapping
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rankscope.errors import ParityError, TokensError, require
from rankscope.nets import Transformer
from rankscope.shapes import Bool, Float
from rankscope.sources.canonical import canonical
from rankscope.sources.load import built_as, in_memory
from rankscope.sources.parity import TOLERANCE, check, distance, lifted, original


class BatchNetwork(NamedTuple):
    """A network and the tokens of one batch, in float64 on the CPU."""

    net: Transformer
    X: Float[Tensor, "batch token width"]
    padding: Bool[Tensor, "batch token"]


@torch.no_grad()
def network_on_batch(model: nn.Module, batch: Mapping[str, Any]) -> BatchNetwork:
    """Map a model onto its canonical network, and one batch onto tokens of layer 0. The model is not changed.

    `batch` holds the arguments that the model is called with, by name; padding is where its `attention_mask`
    is 0. Raises `ParityError` where network and model disagree on the batch.
    """
    checkpoint, name = in_memory(model), type(model).__name__
    family = checkpoint.family
    with built_as(family, name):
        net, embedding = canonical(checkpoint, name)
        core = checkpoint.core
        check(net, family, core, embedding, name)
        taken = signature(core.forward).parameters.keys() - OF_THE_CALL
        arguments = {key: _wide(value) for key, value in batch.items() if key in taken}
        with lifted():
            theirs = original(family, core, arguments, attention=False)
        if family.side == "decoder":
            net = _reading(net, arguments, name)
    X = theirs.states[0]
    padding = _padding(arguments.get("attention_mask"), X)
    X = X.masked_fill(padding[..., None], 0.0)
    error = distance(net.run(X, padding), theirs, ~padding, family.output(core), name)
    message = f"the canonical network must agree with {name} on this batch within {TOLERANCE:g}; it is off by"
    advice = "position_ids, for example, must count real tokens one by one"
    message = f"{message} {error:.1e}: see {', '.join(arguments)} ({advice})"
    require(error <= TOLERANCE, message, ParityError, "batch")
    return BatchNetwork(net, X, padding)


OF_THE_CALL = {"use_cache", "output_attentions", "output_hidden_states", "return_dict"}
"""Arguments that select what the model returns, not what it computes."""


def _reading(net: Transformer, arguments: Mapping[str, Any], name: str) -> Transformer:
    """The decoder with the encoder output of this batch as its memory."""
    memory, mask = arguments.get("encoder_hidden_states"), arguments.get("encoder_attention_mask")
    if not isinstance(memory, Tensor):
        message = f"{name} reads a memory; the batch must hold encoder_hidden_states, and has none"
        raise TokensError(message, subject="encoder_hidden_states")
    return net.with_memory(memory, None if mask is None else mask == 0)


def _padding(mask: Any, X: Tensor) -> Tensor:
    if mask is None:
        return torch.zeros(X.shape[:2], dtype=torch.bool)
    if not isinstance(mask, Tensor) or mask.shape != X.shape[:2]:
        came = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        message = f"attention_mask must be [batch, token] {tuple(X.shape[:2])}, 0 at padding; received {came}"
        raise TokensError(message, subject="attention_mask")
    padding = mask == 0
    message = "every sample must have at least one real token; one has none: leave it out"
    require(not padding.all(-1).any(), message, TokensError, "attention_mask")
    return padding


def _wide(value: Any) -> Any:
    """The value on the CPU; floating tensors in float64."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().to("cpu", torch.float64 if value.is_floating_point() else None)

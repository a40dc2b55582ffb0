"""What `measure`, `certify` and `decompose` are given, as a network and its tokens: each calls `inputs_of` first.

A Hugging Face model in memory becomes a `Transformer` (`network_of`),
texts and token ids become tokens of layer 0 (`net.encode`), and anything else is refused in a sentence.

The monitor decomposes a model during training on a batch of the model's own (`network_on_batch`). `load` compares
network and model on inputs of its own; there they are also compared on the batch itself, so that a batch whose
positions, segments or mask the canonical network would read differently is refused.
"""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from rankscope.errors import ParityError, SourceError, TokensError, require
from rankscope.nets import Encoded, Transformer, padding_from
from rankscope.sources.canonical import canonical
from rankscope.sources.loading import built_as, in_memory, load
from rankscope.sources.parity import TOLERANCE, check, distance, lifted, original

NetworkLike = Transformer | nn.Module  # A network, or a model of transformers in memory, which `load` makes one of
InputsLike = Tensor | np.ndarray | Encoded | str | Sequence[Any] | Mapping[str, Any]
"""Tokens `[batch, token, width]`; what `net.encode` gave; texts or token ids, which `net.encode` reads. Ids and tokens
may be tensors, numpy arrays or lists; ids also come as a tokenizer gives them, with their `attention_mask`."""
OF_THE_CALL = {"use_cache", "output_attentions", "output_hidden_states", "return_dict"}
"""Arguments that select what the model returns, not what it computes."""


class NetworkInputs(NamedTuple):
    """A network, and tokens that it takes."""

    net: Transformer
    X: Tensor  # `[batch, token, width]`, floating
    padding: Tensor | None  # True at padded tokens


def network_of(caller: str, model: NetworkLike) -> Transformer:
    """The network itself, or the one that `load` makes of a Hugging Face model; anything else is a `SourceError`."""
    if isinstance(model, Transformer):
        return model
    if isinstance(model, nn.Module):
        return load(model)
    if isinstance(model, str):
        advice = f"load it, as in {caller}(load({model!r}), texts)"
        raise SourceError(f"{caller} takes a network; got the name {model!r}: {advice}", subject="net")
    message = f"{caller} takes a network, as load or fresh gives it, or a model of transformers"
    raise SourceError(f"{message}; got a {type(model).__name__}", subject="net")


def inputs_of(
    caller: str, model: NetworkLike, X: InputsLike, padding: Tensor | None = None, attention_mask: Tensor | None = None
) -> NetworkInputs:
    """The network and the tokens that a public function, `caller`, was given; its padding, True at padded tokens,
    may come as an `attention_mask` instead, 1 at tokens. Raises `TokensError` for tokens or padding that do not fit."""
    net = network_of(caller, model)
    texts = isinstance(X, str) or (isinstance(X, list | tuple) and X and all(isinstance(x, str) for x in X))
    if texts or isinstance(X, Encoded):
        kind = "texts" if texts else "what encode gave"
        message = f"padding goes with tokens; {caller} was given {kind}, which say it themselves: leave it out"
        require(padding is None and attention_mask is None, message, TokensError, "padding")
        return NetworkInputs(net, *(X if isinstance(X, Encoded) else net.encode(cast(str | Sequence[str], X))))
    if isinstance(X, Mapping) and "input_ids" in X:  # as a tokenizer gives them
        if padding is None and attention_mask is None and "attention_mask" in X:
            attention_mask = _tensor(caller, X["attention_mask"])
        X = X["input_ids"]
    X = _tensor(caller, X)
    padding, attention_mask = (
        _differentiable(torch.from_numpy(mask) if isinstance(mask, np.ndarray) else mask)
        for mask in (padding, attention_mask)
    )
    padding = padding_from(padding, attention_mask, tuple(X.shape[:2]))
    if not X.is_floating_point():
        if X.ndim == 2 and net.origin is not None:
            return NetworkInputs(net, *net.encode(X, padding=padding))
        message = f"tokens must be a floating tensor [batch, token, width]; received {X.dtype} {tuple(X.shape)}"
        advice = "one text is ids [1, token], as ids[None]" if X.ndim == 1 and net.origin is not None else ""
        advice = advice or "token ids [batch, token] go with a network that load or fresh gave"
        raise TokensError(f"{message}: {advice}", subject="X")
    return NetworkInputs(net, X, padding)


def _tensor(caller: str, X: object) -> Tensor:
    """The tensor of an array or of nested lists; anything else is a `TokensError` that says what to do."""
    try:
        numbers = X if isinstance(X, Tensor) else torch.from_numpy(np.asarray(X))
    except (TypeError, ValueError) as error:
        expected = f"{caller} takes texts, token ids [batch, token] or tokens [batch, token, width]"
        advice = "pad ids of several lengths, as tokenizer(texts, padding=True, return_tensors='pt') does"
        raise TokensError(f"{expected}; received a {type(X).__name__}: {advice}", subject="X") from error
    require(not numbers.is_meta, f"{caller} takes tokens in memory; these are on the meta device", TokensError, "X")
    made: Tensor = _differentiable(numbers)
    return made


def _differentiable(x: Any) -> Any:
    """x, or a copy of a tensor that was made in `inference_mode`, which no gradient can go through."""
    return x.clone() if isinstance(x, Tensor) and x.is_inference() else x


@torch.no_grad()
def network_on_batch(model: nn.Module, batch: Mapping[str, Any]) -> NetworkInputs:
    """A model's canonical network, and one batch as tokens of layer 0, in float64 on the CPU. The model is not changed.

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
        arguments = {
            key: value.detach().to("cpu", torch.float64 if value.is_floating_point() else None)
            if isinstance(value, Tensor) else value
            for key, value in batch.items() if key in taken
        }  # fmt: skip
        with lifted():
            theirs = original(family, core, arguments, attention=False)
        if family.side == "decoder":
            memory, memory_mask = arguments.get("encoder_hidden_states"), arguments.get("encoder_attention_mask")
            message = f"{name} reads a memory; the batch must hold encoder_hidden_states, and has none"
            require(isinstance(memory, Tensor), message, TokensError, "encoder_hidden_states")
            net = net.with_memory(cast(Tensor, memory), None if memory_mask is None else memory_mask == 0)
    X, mask = theirs.states[0], arguments.get("attention_mask")
    shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
    message = f"attention_mask must be [batch, token] {tuple(X.shape[:2])}, 0 at padding; received {shape}"
    require(mask is None or shape == X.shape[:2], message, TokensError, "attention_mask")
    padding = torch.zeros(X.shape[:2], dtype=torch.bool) if mask is None else mask == 0
    message = "every sample must have at least one valid token; one has none: leave it out"
    require(not padding.all(-1).any(), message, TokensError, "attention_mask")
    X = X.masked_fill(padding[..., None], 0.0)
    error = distance(net.run(X, padding), theirs, ~padding, family.output(core), name)
    message = f"the canonical network must agree with {name} on this batch within {TOLERANCE:g}; it is off by"
    advice = "position_ids, for example, must count valid tokens one by one"
    message = f"{message} {error:.1e}: see {', '.join(arguments)} ({advice})"
    require(error <= TOLERANCE, message, ParityError, "batch")
    return NetworkInputs(net, X, padding)

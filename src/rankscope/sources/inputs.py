"""What `measure`, `certify` and `decompose` are given, as a network and its tokens: each calls `inputs_of` first.

A Hugging Face model in memory becomes a `Transformer` (`network_of`),
texts and token ids become tokens of layer 0 (`net.encode`), and anything else is refused in a sentence.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from rankscope.errors import SourceError, TokensError, require
from rankscope.nets import Encoded, Transformer, padding_from
from rankscope.sources.load import load

NetworkLike = Transformer | nn.Module  # A network, or a model of transformers in memory, which `load` makes one of
InputsLike = Tensor | np.ndarray | Encoded | str | Sequence[Any] | Mapping[str, Any]
"""Tokens `[batch, token, width]`; what `net.encode` gave; texts or token ids, which `net.encode` reads. Ids and tokens
may be tensors, numpy arrays or lists; ids also come as a tokenizer gives them, with their `attention_mask`."""


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

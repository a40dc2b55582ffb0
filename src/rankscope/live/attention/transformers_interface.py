"""Attention of Hugging Face models, seen through transformers' attention interface.

Every attention module asks `AttentionInterface.get_interface` for the function that its config names. While a model is
watched, the answer is that function, followed by a report of what it did: the model computes what it computes
unwatched, to the last bit, and a forward pass that is computed again for gradients, inside the watch or after it, is
the same as the first. Kernels that return no pattern (sdpa, flash, flex) have it computed a second time, without
gradients and without dropout, by `eager_attention_forward` of the modeling file that the module comes from.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, reduce, wraps
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.errors import WatchError
from rankscope.live.attention.head_outputs import values_product
from rankscope.live.attention.kernels import only_seen
from rankscope.live.attention.observer import AttentionCall, OnAttention, Products
from rankscope.live.attention.scores import AttentionScores
from rankscope.live.hooks import Replacements, is_traced, without_dropout
from rankscope.live.modules import WatchedBlocks
from rankscope.sources import is_transformers_own, lifted

_reports = Replacements()  # heard, for each watch, by a function to call with the attention of each module


class TransformersInterface:
    """Observes Hugging Face models whose attention goes through `AttentionInterface`."""

    def applies(self, model: nn.Module, blocks: WatchedBlocks) -> bool:
        """True if the blocks are a Hugging Face model's that takes its attention from the interface."""
        owner = huggingface_model(model, blocks)
        return owner is not None and bool(type(owner)._can_set_attn_implementation())

    @contextmanager
    def attach(self, blocks: WatchedBlocks, on_attention: OnAttention) -> Iterator[str | None]:
        """Inside, attention in the blocks is reported; neither models nor their configs are touched."""
        from transformers import AttentionInterface

        callbacks = {part: on_attention for block in blocks for part in block.modules()}
        reporting = _reporting(AttentionInterface.get_interface)
        with _reports.heard_by(callbacks, [(AttentionInterface, "get_interface", reporting)]):
            owner: Any = huggingface_model(blocks.model, blocks)
            ran = f"Attention ran with {owner.config._attn_implementation}"
            sentence = f"{ran}; what is read of it was computed a second time, without dropout."
            yield None if owner.config._attn_implementation == "eager" else sentence


def huggingface_model(model: nn.Module, blocks: Sequence[nn.Module]) -> Any | None:
    """The innermost Hugging Face model that holds all the blocks; None if none does. Observers ask its class, config
    and the files it is written in how it attends, and change nothing in it."""
    if "transformers" not in sys.modules:
        return None
    from transformers import PreTrainedModel

    ids = {id(block) for block in blocks}
    innermost = None
    for part in model.modules():  # outer before inner
        if isinstance(part, PreTrainedModel) and ids <= {id(inner) for inner in part.modules()}:
            innermost = part
    return innermost


def calls_torch(owner: Any) -> bool:
    """True if the files that a Hugging Face model is written in mention torch's attention or a softmax."""
    files = {name for part in owner.modules() if not (name := type(part).__module__).startswith("torch.")}
    try:
        texts = [inspect.getsource(sys.modules[file]) for file in files]
    except (KeyError, OSError, TypeError):  # a notebook has no file: it may
        return True
    return any("scaled_dot_product_attention" in text or "softmax(" in text.lower() for text in texts)


def _reporting(get_interface: Any) -> Any:
    """`get_interface` whose functions, after they ran, report the attention of modules that are watched."""

    @wraps(get_interface)
    def reporting_interface(self: Any, *names: Any, **named: Any) -> Any:
        function = get_interface(self, *names, **named)

        def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = function(module, *args, **kwargs)
            for on_attention in [callbacks[module] for callbacks in _reports.listeners if module in callbacks]:
                call = InterfaceCall(function, result, module, args, kwargs)
                parts: Any = {"scores": call.scores, "products": call.products}
                on_attention(AttentionCall(pattern=call.pattern, head_outputs=result[0].detach, **parts))
            return result

        return function if is_traced() else attend

    return reporting_interface


class InterfaceCall:
    """A call of an attention function of the interface: what it returned, the module it is of, and its arguments."""

    def __init__(
        self, function: Any, result: tuple[Tensor, Any], module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        self.function, self.module, self.args, self.named = function, module, args, named
        self.output = result[0]
        returned = result[1] if len(result) > 1 else None
        self.returned = returned.detach() if isinstance(returned, Tensor) and returned.ndim == 4 else None

    def pattern(self) -> Tensor:
        """The pattern that the function returned, or, where it returned none, that of the eager function."""
        if self.returned is not None:
            return self.returned
        if not is_transformers_own(self.function):
            name = getattr(self.function, "__name__", self.function)
            fault = f"{name} of {type(self.module).__name__} does neither: watch tokens"
            raise WatchError(f"attention must return its pattern, or be transformers'; {fault}", subject="attention")
        return _eager_pattern(self.module, *self.args, **self.named)

    def scores(self) -> AttentionScores | None:
        """How the function made its scores, as its arguments say; None where these, or it, are not transformers'. What
        functions of single models do beside is not known here: without `products` to check it by, None as well."""
        known = self.file.startswith("transformers.integrations") or self.products is not None
        if not is_transformers_own(self.function) or not known or len(self.args) != 4:
            return None
        query, key, _, mask = self.args
        if query.ndim != 4 or key.ndim != 4:
            return None
        query, key = (x.detach().to(self.output.dtype) for x in (query, key))
        options: dict[str, Any] = {"scale": self.named.get("scaling"), "softcap": self.named.get("softcap")}
        if "sdpa" not in self.file:  # sdpa takes both and passes over them
            options |= {"sinks": self._detached("s_aux"), "sequence": self._sequences(query)}
        bias = self._detached("position_bias")
        modifications = [] if bias is None else [lambda s, at: s + bias[:, :, at].to(s)]
        if isinstance(mask, Tensor) and mask.ndim == 4:
            options["mask"] = mask.detach()[..., : key.shape[2]]
        elif hasattr(mask, "mask_mod"):
            modifications.append(partial(only_seen, mask.mask_mod))
        elif self.returned is None:  # a kernel without a matrix mask
            options["causal"] = is_causal(self.module, self.named) and query.shape[2] > 1
            if (window := self.named.get("sliding_window")) is not None:
                options["window"] = (window - 1, window - 1)
            if isinstance(mask, Tensor):
                options["mask"] = mask.detach().bool()[:, None, None, : key.shape[2]]
        if modifications:  # one after another
            options["modified"] = lambda scores, at: reduce(lambda s, modified: modified(s, at), modifications, scores)
        return AttentionScores(query=query, key=key, **options)

    @property
    def file(self) -> str:
        """The Python module that the function is written in."""
        return str(getattr(getattr(self.function, "func", self.function), "__module__", ""))

    @property
    def dropout(self) -> float:
        """The rate of dropout between pattern and values."""
        return float(self.named.get("dropout") or 0.0)

    @property
    def products(self) -> Products | None:
        """What rows of a pattern give beside what the function gave; None where dropout hides it."""
        if self.returned is not None:
            return self._returned_rows
        return None if self.dropout or len(self.args) < 3 else values_product(self.args[2], self.output)

    def _returned_rows(self, rows: Tensor, P: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of a pattern beside those that the function returned, where dropout left them."""
        assert self.returned is not None
        returned = self.returned[:, :, rows]
        if self.dropout and self.module.training:
            P, returned = P.masked_fill(returned == 0, 0.0), returned * (1 - self.dropout)
        return P.transpose(1, 2), returned.transpose(1, 2)

    def _detached(self, name: str) -> Tensor | None:
        """The tensor of an argument by its name, without gradients; None without it."""
        value = self.named.get(name)
        return value.detach() if isinstance(value, Tensor) else None

    def _sequences(self, query: Tensor) -> Tensor | None:
        """The number of the sequence that each token of a packed batch belongs to, where its ends are given."""
        ends = self._detached("cu_seq_lens_q")
        if ends is None or len(query) != 1 or int(ends[-1]) != query.shape[2] or self.returned is not None:
            return None
        lengths = ends.to(query.device, torch.long).diff()
        return torch.repeat_interleave(torch.arange(len(lengths), device=query.device), lengths)[None]


def is_causal(module: nn.Module, named: dict[str, Any]) -> bool:
    """True if a kernel without a matrix mask is causal: as its argument says, else as its module."""
    causal = named.get("is_causal")
    return bool(getattr(module, "is_causal", True) if causal is None else causal)


def _eager_pattern(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
) -> Tensor:
    """The pattern of a call computed once more, without gradients and dropout, by the model's eager function."""
    sizes = (query.shape[0], query.shape[2], key.shape[2])
    mask = additive_mask(attention_mask, sizes, query, is_causal(module, kwargs), kwargs.get("sliding_window"))
    # Many models take softmax in float32 when they run eagerly; a kernel in float64 did not.
    wide = lifted() if query.dtype == torch.float64 else nullcontext()
    with torch.no_grad(), without_dropout(module), wide:
        _, pattern = _eager(module)(module, query, key, value, mask, *args, **{**kwargs, "dropout": 0.0})
    assert isinstance(pattern, Tensor)
    return pattern


def additive_mask(
    mask: Any, sizes: tuple[int, int, int], like: Tensor, causal: bool, window: int | None
) -> Tensor | None:
    """The mask that eager attention adds to scores `like` this tensor, from that of sdpa (a matrix or None), flash
    (padding or None) or flex. `sizes` are batch, queries and keys; `causal` and `window` count without a matrix."""
    batch, rows, columns = sizes
    if isinstance(mask, Tensor) and mask.ndim == 4:
        if mask.is_floating_point():
            return mask
        visible = mask.bool()
    elif hasattr(mask, "mask_mod"):
        from torch.nn.attention.flex_attention import create_mask

        visible = create_mask(mask.mask_mod, batch, 1, rows, columns, device=str(like.device))
    else:
        back = torch.arange(rows, device=like.device)[:, None] - torch.arange(columns, device=like.device)
        visible = (back >= 0) | (rows == 1) if causal else torch.ones_like(back, dtype=torch.bool)
        if window is not None:  # for sdpa a window is in its matrix alone
            visible = visible & (back.abs() < window)
        visible = visible[None, None]
        if isinstance(mask, Tensor):
            visible = visible & mask.bool()[:, None, None, :]
    return torch.zeros_like(visible, dtype=like.dtype).masked_fill(~visible, torch.finfo(like.dtype).min)


def _eager(module: nn.Module) -> Callable[..., Any]:
    """`eager_attention_forward` of the file where the module's class, or one it derives from, is written."""
    for kind in type(module).__mro__:
        function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if callable(function):
            return function
    fault = f"{type(module).__module__}, where {type(module).__name__} is written, has none: watch metrics of tokens"
    raise WatchError(f"watching attention needs eager_attention_forward of the model; {fault}", subject="attention")

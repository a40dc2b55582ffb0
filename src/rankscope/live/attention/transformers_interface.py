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
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.errors import WatchError
from rankscope.live.attention.observer import AttentionCall, OnAttention, WatchedBlocks
from rankscope.live.isolation import without_dropout
from rankscope.sources.parity import is_transformers_own, lifted

_callbacks: dict[nn.Module, OnAttention] = {}  # whom to report the attention of watched modules to, in all watches


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

        interface: Any = AttentionInterface
        callbacks = {part: on_attention for block in blocks for part in block.modules()}
        if not _callbacks:
            interface.get_interface = _reporting(interface.get_interface)
        _callbacks.update(callbacks)
        try:
            owner: Any = huggingface_model(blocks.model, blocks)
            ran = f"Attention ran with {owner.config._attn_implementation}"
            sentence = f"{ran}; its pattern was computed a second time, without dropout."
            yield None if owner.config._attn_implementation == "eager" else sentence
        finally:
            for part in callbacks:
                _callbacks.pop(part, None)
            if not _callbacks:
                interface.get_interface = interface.get_interface.__wrapped__


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
    files = {type(part).__module__ for part in owner.modules()}
    return any(map(_mentions_attention, (name for name in files if not name.startswith("torch."))))


def _mentions_attention(file: str) -> bool:
    """True if the source of a Python module mentions torch's attention or a softmax, or cannot be read."""
    try:
        text = inspect.getsource(sys.modules[file])
        return "scaled_dot_product_attention" in text or "softmax(" in text.lower()
    except (KeyError, OSError, TypeError):  # a notebook has no file
        return True


def _reporting(get_interface: Any) -> Any:
    """`get_interface` whose functions, after they ran, report the attention of modules that are watched."""

    @wraps(get_interface)
    def reporting_interface(self: Any, *names: Any, **named: Any) -> Any:
        function = get_interface(self, *names, **named)

        def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = function(module, *args, **kwargs)
            if module in _callbacks:
                pattern = partial(_pattern, function, result[1], module, *args, **kwargs)
                _callbacks[module](AttentionCall(pattern=pattern, head_outputs=result[0].detach))
            return result

        return attend

    return reporting_interface


def _pattern(function: Any, returned: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """The pattern that the function returned, or, where it returned none, that of the eager function."""
    if isinstance(returned, Tensor) and returned.ndim == 4:
        return returned.detach()
    if not is_transformers_own(function):
        came = f"{getattr(function, '__name__', function)} of {type(module).__name__} does neither: watch tokens"
        raise WatchError(f"attention must return its pattern, or be transformers'; {came}", subject="attention")
    return _eager_pattern(module, *args, **kwargs)


def _eager_pattern(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
) -> Tensor:
    """The pattern of a call computed once more, without gradients and dropout, by the model's eager function."""
    sizes = (query.shape[0], query.shape[2], key.shape[2])
    causal = kwargs.get("is_causal")  # of a kernel without a matrix mask: as its argument says, else as its module
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    mask = additive_mask(attention_mask, sizes, query, causal, kwargs.get("sliding_window"))
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
    came = f"{type(module).__module__}, where {type(module).__name__} is written, has none: watch metrics of tokens"
    raise WatchError(f"watching attention needs eager_attention_forward of the model; {came}", subject="attention")

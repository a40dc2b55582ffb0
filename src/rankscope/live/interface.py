"""Attention of Hugging Face models, seen through transformers' attention interface.

Every attention module asks `AttentionInterface.get_interface` for the function that its config names. While a
model is watched, what it gets is that function with a look at what it did: the model computes what it
computes unwatched, to the last bit, and a forward pass that is computed again for gradients, inside the watch
or after it, is the same as the first. Kernels that keep no weights (sdpa, flash, flex) have them computed
beside, without gradients and without dropout, by `eager_attention_forward` of the modeling file that the
module comes from.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.errors import WatchError
from rankscope.live.isolation import without_dropout
from rankscope.sources.parity import is_transformers_own, lifted

Weights = Callable[[], tuple[Tensor, Tensor]]
"""Gives the weights `[batch, head, token, token]` and the heads' outputs `[batch, token, head, d]`."""
Seen = Callable[[Weights], None]

_watched: dict[nn.Module, Seen] = {}
"""Attention modules, and who looks at them."""


def owner_of(model: nn.Module, blocks: Sequence[nn.Module]) -> Any | None:
    """The innermost Hugging Face model that holds the blocks; None where they are no such model's."""
    if "transformers" not in sys.modules:
        return None
    from transformers import PreTrainedModel

    inside = {id(block) for block in blocks}
    found = None
    for part in model.modules():  # outer before inner
        if isinstance(part, PreTrainedModel) and inside <= {id(each) for each in part.modules()}:
            found = part
    return found


def is_outside(owner: Any) -> bool:
    """Whether this model's attention does not go through the interface."""
    return not type(owner)._can_set_attn_implementation()


def calls_torch(owner: Any) -> bool:
    """Whether the files that such a model is written in may call torch's attention, or a softmax,
    themselves."""
    names = {type(part).__module__ for part in owner.modules()}
    return any(map(_mentions_torch, (name for name in names if not name.startswith("torch."))))


def _mentions_torch(name: str) -> bool:
    try:
        text = inspect.getsource(sys.modules[name])
        return "scaled_dot_product_attention" in text or "softmax(" in text.lower()
    except (KeyError, OSError, TypeError):  # a notebook has no file
        return True


def refusal(owner: Any) -> str:
    """What to say where attention is asked of a model outside the interface."""
    return (
        "attention can be watched in models that use transformers' attention interface or torch's functions; "
        f"{owner.config.model_type} ({type(owner).__name__}) does not: watch metrics of tokens, or measure "
        "attention through load and measure where its family can be loaded"
    )


@contextmanager
def through_interface(blocks: Sequence[nn.Module], seen: Seen) -> Iterator[None]:
    """Attention in these blocks is shown to `seen`; neither models nor their configs are touched."""
    from transformers import AttentionInterface

    interface: Any = AttentionInterface
    parts = {part: seen for block in blocks for part in block.modules()}
    if not _watched:
        interface.get_interface = _with_a_look(interface.get_interface)
    _watched.update(parts)
    try:
        yield
    finally:
        for part in parts:
            _watched.pop(part, None)
        if not _watched:
            interface.get_interface = interface.get_interface.__wrapped__


def _with_a_look(usual: Any) -> Any:
    @wraps(usual)
    def get_interface(self: Any, *names: Any, **named: Any) -> Any:
        function = usual(self, *names, **named)

        def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            found = function(module, *args, **kwargs)
            if module in _watched:
                _watched[module](lambda: _weights(function, found, module, *args, **kwargs))
            return found

        return attend

    return get_interface


def _weights(
    function: Any,
    found: tuple[Tensor, Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """What the function gave, or what its kernel kept to itself."""
    output, weights = found
    if isinstance(weights, Tensor) and weights.ndim == 4:
        return weights.detach(), output.detach()
    if not is_transformers_own(function):
        raise WatchError(
            "attention can be watched where its function gives its weights, or is transformers' own; "
            f"{getattr(function, '__name__', function)} of {type(module).__name__} does neither: watch "
            "metrics of tokens"
        )
    sizes = (query.shape[0], query.shape[2], key.shape[2])
    mask = additive(attention_mask, sizes, query, _causal(module, kwargs), kwargs.get("sliding_window"))
    # Many models take softmax in float32 when they run eagerly; a kernel in float64 did not.
    wide = lifted() if query.dtype == torch.float64 else nullcontext()
    with torch.no_grad(), without_dropout(module), wide:
        _, weights = _eager(module)(module, query, key, value, mask, *args, **{**kwargs, "dropout": 0.0})
    return weights, output.detach()


def _causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """As transformers' kernels decide it where no mask of who sees whom is given."""
    asked = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if asked is None else asked)


def additive(
    mask: Any, sizes: tuple[int, int, int], like: Tensor, causal: bool, window: int | None
) -> Tensor | None:
    """The mask that eager attention adds to its scores, from the one that a kernel was given.

    sdpa takes a matrix, or none; flash takes padding `[batch, token]` or none, with a window; flex a function
    of places. Without a matrix the kernel is causal where the module is.
    """
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
        # sdpa is told of windows by its matrix alone.
        visible = visible if window is None else visible & (back.abs() < window)
        visible = visible[None, None]
        if isinstance(mask, Tensor):
            visible = visible & mask.bool()[:, None, None, :]
    return torch.zeros_like(visible, dtype=like.dtype).masked_fill(~visible, torch.finfo(like.dtype).min)


def _eager(module: nn.Module) -> Callable[..., Any]:
    """`eager_attention_forward` of the file where the module's class, or one it derives from, is written."""
    for each in type(module).__mro__:
        found = getattr(sys.modules.get(each.__module__), "eager_attention_forward", None)
        if callable(found):
            return found
    raise WatchError(
        "attention is watched through eager_attention_forward of the modeling file; "
        f"{type(module).__module__}, where {type(module).__name__} is written, has none: watch "
        "metrics of tokens"
    )

"""Which tokens are padding: read off what the model was called with.

| argument                                                      | shape           | padding where |
|---------------------------------------------------------------|-----------------|---------------|
| `attention_mask`, `decoder_attention_mask`                    | batch x token   | it is 0       |
| `src_key_padding_mask`, `tgt_key_padding_mask`,               | batch x token   | it is True,   |
| `key_padding_mask`, `padding_mask`                            |                 | or -inf       |

A mask of another shape says who sees whom, not who is there: no padding.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

REAL = ("attention_mask",)
PADDED = ("src_key_padding_mask", "key_padding_mask", "padding_mask")
OF_DECODERS = ("decoder_attention_mask", "tgt_key_padding_mask")


def arguments_of(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a module was called with, by the names in its `forward`; a name not passed is left out."""
    try:
        bound = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # a forward that cannot be asked, or a call it will itself refuse
        return dict(kwargs)
    inner = getattr(module, "module", None)
    if set(bound) <= {"args", "inputs", "input", "kwargs"} and isinstance(inner, nn.Module):
        return arguments_of(inner, args, kwargs)  # a wrapper, such as DistributedDataParallel
    return {**bound, **kwargs}


def padding_in(arguments: Mapping[str, Any], decoder: bool = False) -> Tensor | None:
    """`[batch, token]`, True at padding; None where the call says nothing of it.

    A decoder beside an encoder has masks of its own: `decoder` says that the blocks are such a decoder's.
    """
    names = OF_DECODERS if decoder else (*REAL, *PADDED)
    for name in names:
        mask = arguments.get(name)
        if not isinstance(mask, Tensor) or mask.ndim not in (1, 2):
            continue
        if mask.ndim == 1 and "padding" not in name:
            continue
        mask = mask.detach() if mask.ndim == 2 else mask.detach()[None]
        if name.endswith("attention_mask"):
            return mask == 0
        return mask < 0 if mask.is_floating_point() else mask.bool()
    return None


def is_decoder(model: nn.Module, stack: str) -> bool:
    """Whether this stack is the decoder of a model that is called with masks for both sides."""
    try:
        names = set(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        return False
    both = bool(names & set(OF_DECODERS))
    return both and ("decoder" in stack.split(".") or not names & {"attention_mask", "src_key_padding_mask"})


def continues_from_cache(arguments: Mapping[str, Any]) -> bool:
    """Whether the call continues from a cache: its tokens attend to others that are not among its states."""
    cache = arguments.get("past_key_values")
    length = getattr(cache, "get_seq_length", None)
    if not callable(length):
        return bool(cache)
    try:
        return int(length()) > 0
    except ValueError:  # a cache of states without a length, as of mamba
        return False

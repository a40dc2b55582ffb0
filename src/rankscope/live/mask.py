"""Which tokens are padding: read off what the model, or a part of it around the blocks, was called with.

| argument                               | shape                   | padding where                  |
|----------------------------------------|-------------------------|--------------------------------|
| `attention_mask`, `input_mask`         | batch x token           | it is 0                        |
| `..._key_padding_mask`, `padding_mask` | batch x token           | it is True, or -inf            |
| `mask`                                 | batch x token           | what its longest sample is not |
| `attention_mask` of the first block    | batch x 1 x ... x token | no token may look              |

Arguments may lie in dictionaries. The longest sample of a batch has no padding: so `mask`, which some write
with 1 for real tokens and some with 1 for padding, says which; where it does not, an error asks.
A mask of another shape says who sees whom, not who is there: no padding.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rankscope.errors import WatchError

REAL = ("attention_mask", "input_mask")
PADDED = ("src_key_padding_mask", "key_padding_mask", "encoder_padding_mask", "padding_mask")
EITHER = ("mask",)
OF_DECODERS = ("decoder_attention_mask", "tgt_key_padding_mask")
DEEPEST = 3
"""Dictionaries in dictionaries that are looked through."""
_signatures: WeakKeyDictionary[type[nn.Module], tuple[Any, inspect.Signature]] = WeakKeyDictionary()


class Padding(NamedTuple):
    """What was found: `[batch, token]`, True at padding, and the argument that said so."""

    at: Tensor
    name: str


def arguments_of(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a module was called with, by the names in its `forward`; a name not passed is left out."""
    try:
        bound = _signature(module).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # a forward that cannot be asked, or a call it will itself refuse
        return dict(kwargs)
    inner = getattr(module, "module", None)
    if set(bound) <= {"args", "inputs", "input", "kwargs"} and isinstance(inner, nn.Module):
        return arguments_of(inner, args, kwargs)  # a wrapper, such as DistributedDataParallel
    found = {**bound, **kwargs}
    if type(module).__module__.startswith("torch.nn."):
        found.pop("mask", None)  # torch's own say with it who sees whom
    return found


def _signature(module: nn.Module) -> inspect.Signature:
    """Of its `forward`; of one that its class has, asked once."""
    if "forward" in vars(module):
        return inspect.signature(module.forward)
    kind = type(module)
    known = _signatures.get(kind)
    if known is None or known[0] is not kind.forward:
        known = _signatures[kind] = kind.forward, inspect.signature(module.forward)
    return known[1]


def masks_of(module: nn.Module) -> list[tuple[str, int]]:
    """(name, place) of the arguments of its `forward` that may say which tokens are padding."""
    try:
        names = list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return []
    own = () if type(module).__module__.startswith("torch.nn.") else EITHER  # torch's says who sees whom
    known = (*OF_DECODERS, *REAL, *PADDED, *own)
    return [(name, names.index(name)) for name in known if name in names]


def find_padding(
    calls: Sequence[Mapping[str, Any]], block: Mapping[str, Any], shape: Sequence[int], decoder: bool = False
) -> Padding | None:
    """The padding of tokens of this shape; None where nothing says anything of it.

    `calls` are the arguments of the model and of its parts around the blocks, from the outside in, `block`
    those of the first block. A decoder beside an encoder has masks of its own: `decoder` says that the blocks
    are such a decoder's.
    """
    if decoder:
        return _fitting(calls, OF_DECODERS, shape)
    found = (
        _fitting(calls, (*REAL, *PADDED), shape) or _fitting([block], PADDED, shape) or _unseen(block, shape)
    )
    return found or _fitting([*calls, block], EITHER, shape)


def _fitting(
    calls: Sequence[Mapping[str, Any]], names: Sequence[str], shape: Sequence[int]
) -> Padding | None:
    """The first mask of these names that is of the tokens' shape."""
    others = []
    for call in calls:
        for name, mask in _masks(call, names):
            if mask.shape == tuple(shape):
                return Padding(_meant(name, mask), name)
            others.append((name, tuple(mask.shape)))
    if others and not set(names) & set(EITHER):
        raise WatchError(
            f"the model's mask must have the shape of its tokens {tuple(shape)}; {others[0][0]} has "
            f"{others[0][1]}: give padding= (True at padded tokens), padding='none', or layout="
        )
    return None


def _masks(found: Any, names: Sequence[str], depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Masks `[batch, token]` under these names, those on the outside first; of one sample `[1, token]`."""
    inside = found.items() if isinstance(found, Mapping) else enumerate(found)
    deeper = []
    for name, value in inside:
        if isinstance(value, Mapping | list | tuple):
            deeper.append(value)
        elif name in names and isinstance(value, Tensor):
            if value.ndim == 1 and "padding" in str(name):
                yield str(name), value.detach()[None]
            elif value.ndim == 2:
                yield str(name), value.detach()
    if depth < DEEPEST:
        for value in deeper:
            yield from _masks(value, names, depth + 1)


def _meant(name: str, mask: Tensor) -> Tensor:
    """True at padding."""
    if name.endswith("attention_mask") or name in REAL:
        return mask == 0
    if mask.is_floating_point() and name not in EITHER:
        return mask < 0
    if name in EITHER:
        return _either(name, mask)
    return mask.bool()


def _either(name: str, mask: Tensor) -> Tensor:
    """By the longest sample, which has no padding."""
    added = mask.is_floating_point() and bool((mask < 0).any())
    on = mask < 0 if added else mask != 0
    real, padded = bool(on.all(-1).any()) and not added, bool((~on).all(-1).any())
    square = mask.shape[0] == mask.shape[1] > 1 and any(map(_triangle, (on, on.mT, ~on, ~on.mT)))
    if real == padded or square:
        raise WatchError(
            f"the argument {name!r} must say which tokens are padding; whether it is True at real tokens or "
            "at padding cannot be told from this batch: give padding= (True at padded tokens), or "
            "padding='none'"
        )
    return ~on if real else on


def _triangle(on: Tensor) -> bool:
    """Whether it says who comes after whom."""
    return torch.equal(on, torch.ones_like(on).tril())


def _unseen(block: Mapping[str, Any], shape: Sequence[int]) -> Padding | None:
    """Of the mask that reaches a block, who sees whom: padding is seen by no token."""
    mask = block.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 4 or (mask.shape[0], mask.shape[-1]) != tuple(shape):
        return None
    hidden = mask.detach() < -1e3 if mask.is_floating_point() else ~mask.detach().bool()
    return Padding(hidden.flatten(1, 2).all(1), "attention_mask")


def is_decoder(model: nn.Module, stack: str) -> bool:
    """Whether this stack is the decoder of a model that is called with masks for both sides."""
    try:
        names = set(_signature(model).parameters)
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

"""Which tokens are padding: read off what the model, or a module in it, was called with.

| argument                               | shape                   | padding where                   |
|----------------------------------------|-------------------------|---------------------------------|
| `attention_mask`, `input_mask`         | batch x token           | it is 0                         |
| `..._key_padding_mask`, `padding_mask` | batch x token           | it is True, or -inf             |
| `mask`                                 | batch x token           | what its longest sample is not  |
| `attention_mask` of the first block    | batch x 1 x ... x token | no token may attend             |

Arguments may lie in dictionaries. The longest sample of a batch has no padding: so `mask`, which some write
with 1 for tokens and some with 1 for padding, shows which; where it does not, an error asks. A mask of
another shape says which token sees which, not which are padding.

`recorder.py` calls `arguments_of` for every module around the blocks, then `find_padding` when the first block is
entered; `plan.py` calls `is_decoder`; `monitor/inline.py` calls `mask_arguments_of` and `find_padding`.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rankscope.errors import WatchError

TOKEN_MASKS = ("attention_mask", "input_mask")  # 1 at tokens; the next are True at padding, then either
PADDING_MASKS = ("src_key_padding_mask", "key_padding_mask", "encoder_padding_mask", "padding_mask")
AMBIGUOUS_MASKS = ("mask",)
DECODER_MASKS = ("decoder_attention_mask", "tgt_key_padding_mask")  # of a decoder beside an encoder
GIVE = "give padding= (True at padded tokens), or padding='none'"
DEEPEST = 3  # how deep dictionaries in dictionaries are searched
_signatures: WeakKeyDictionary[type[nn.Module], tuple[Any, inspect.Signature]] = WeakKeyDictionary()


class PaddingArgument(NamedTuple):
    """An argument that says which tokens are padding: `[batch, token]`, True at padding, and its name."""

    padding: Tensor
    name: str


def arguments_of(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a module was called with, by the names in its `forward`; arguments not passed are left out."""
    try:
        bound = _signature(module).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # a forward without a signature, or a call that it will itself refuse
        return dict(kwargs)
    inner = getattr(module, "module", None)
    if set(bound) <= {"args", "inputs", "input", "kwargs"} and isinstance(inner, nn.Module):
        return arguments_of(inner, args, kwargs)  # a wrapper, such as DistributedDataParallel
    arguments = {**bound, **kwargs}
    if type(module).__module__.startswith("torch.nn."):
        arguments.pop("mask", None)  # in torch's own modules it says which token sees which
    return arguments


def _signature(module: nn.Module) -> inspect.Signature:
    """The signature of a module's `forward`; that of a class is looked up once."""
    if "forward" in vars(module):
        return inspect.signature(module.forward)
    kind = type(module)
    known = _signatures.get(kind)
    if known is None or known[0] is not kind.forward:
        known = _signatures[kind] = kind.forward, inspect.signature(module.forward)
    return known[1]


def _argument_names(module: nn.Module) -> list[str]:
    try:
        return list(_signature(module).parameters)
    except (TypeError, ValueError):
        return []


def mask_arguments_of(module: nn.Module) -> list[tuple[str, int]]:
    """(name, position) of the arguments of a module's `forward` that may say which tokens are padding."""
    names = _argument_names(module)
    known = [*DECODER_MASKS, *TOKEN_MASKS, *PADDING_MASKS]
    if not type(module).__module__.startswith("torch.nn."):  # whose `mask` says which token sees which
        known += AMBIGUOUS_MASKS
    return [(name, names.index(name)) for name in known if name in names]


def find_padding(
    calls: Sequence[Mapping[str, Any]], block: Mapping[str, Any], shape: Sequence[int], decoder: bool = False
) -> PaddingArgument | None:
    """The padding of tokens of this shape, if an argument says it: `calls` are those of the model and of modules around
    the blocks, from the outside in, `block` the first block's. A `decoder` beside an encoder has masks of its own."""
    if decoder:
        return _of_shape(calls, DECODER_MASKS, shape)
    return (
        _of_shape(calls, (*TOKEN_MASKS, *PADDING_MASKS), shape)
        or _of_shape([block], PADDING_MASKS, shape)
        or _hidden_from_all(block, shape)
        or _of_shape([*calls, block], AMBIGUOUS_MASKS, shape)
    )


def _of_shape(calls: Sequence[Mapping[str, Any]], names: Sequence[str], shape: Sequence[int]) -> PaddingArgument | None:
    """The first mask of these names that has the tokens' shape."""
    misfits = []
    for call in calls:
        for name, mask in _masks(call, names):
            if mask.shape == tuple(shape):
                return PaddingArgument(_as_padding(name, mask), name)
            misfits.append((name, tuple(mask.shape)))
    if misfits and not set(names) & set(AMBIGUOUS_MASKS):
        name, misfit = misfits[0]
        came = f"{name} has {misfit}: {GIVE}, or layout="
        raise WatchError(f"the mask must have the shape of the tokens {tuple(shape)}; {came}", subject=name)
    return None


def _masks(arguments: Any, names: Sequence[str], depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """(name, mask `[batch, token]`) under these names, outer ones first; of one sample `[1, token]`."""
    items = arguments.items() if isinstance(arguments, Mapping) else enumerate(arguments)
    deeper = []
    for name, value in items:
        if isinstance(value, Mapping | list | tuple):
            deeper.append(value)
        elif name in names and isinstance(value, Tensor):
            mask = value.detach()[None] if value.ndim == 1 and "padding" in str(name) else value.detach()
            if mask.ndim == 2:
                yield str(name), mask
    if depth < DEEPEST:
        for value in deeper:
            yield from _masks(value, names, depth + 1)


def _as_padding(name: str, mask: Tensor) -> Tensor:
    """A mask of this name as padding: True at padded tokens."""
    if name.endswith("attention_mask") or name in TOKEN_MASKS:
        return mask == 0
    if name in AMBIGUOUS_MASKS:
        return _by_longest_sample(name, mask)
    return mask < 0 if mask.is_floating_point() else mask.bool()


def _by_longest_sample(name: str, mask: Tensor) -> Tensor:
    """Padding of a mask that may mean either: the longest sample of a batch has none."""
    added = mask.is_floating_point() and bool((mask < 0).any())
    on = mask < 0 if added else mask != 0
    at_tokens, at_padding = bool(on.all(-1).any()) and not added, bool((~on).all(-1).any())
    triangle = torch.ones_like(on).tril()  # a causal mask, which says which token sees which
    square = mask.shape[0] == mask.shape[1] > 1
    if at_tokens == at_padding or (square and any(x.equal(triangle) for x in (on, on.mT, ~on, ~on.mT))):
        sentence = f"{name} must say which tokens are padding; here it may be True at tokens or at padding: {GIVE}"
        raise WatchError(sentence, subject=name)
    return ~on if at_tokens else on


def _hidden_from_all(block: Mapping[str, Any], shape: Sequence[int]) -> PaddingArgument | None:
    """Padding in the 4D mask that a block takes: the tokens that no token may attend to."""
    mask = block.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 4 or (mask.shape[0], mask.shape[-1]) != tuple(shape):
        return None
    hidden = mask.detach() < -1e3 if mask.is_floating_point() else ~mask.detach().bool()
    return PaddingArgument(hidden.flatten(1, 2).all(1), "attention_mask")


def is_decoder(model: nn.Module, stack: str) -> bool:
    """True if this stack is the decoder of a model that is called with masks for encoder and decoder."""
    names = set(_argument_names(model))
    both = bool(names & set(DECODER_MASKS))
    return both and ("decoder" in stack.split(".") or not names & {"attention_mask", "src_key_padding_mask"})


def continues_from_cache(arguments: Mapping[str, Any]) -> bool:
    """True if a call continues from a cache, so that its tokens attend to more than themselves."""
    cache = arguments.get("past_key_values")
    length = getattr(cache, "get_seq_length", None)
    if not callable(length):
        return bool(cache)
    try:
        return int(length()) > 0
    except ValueError:  # a cache without a length, as mamba's
        return False

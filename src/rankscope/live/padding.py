"""Which tokens are padding: read off what the model, or a module in it, was called with.

| argument                               | shape                   | padding where                   |
|----------------------------------------|-------------------------|---------------------------------|
| `attention_mask`, `input_mask`         | batch x token           | it is 0 (XLNet's `input_mask`: 1) |
| `..._key_padding_mask`, `padding_mask` | batch x token           | it is True                      |
| any of these, with numbers below zero  | batch x token           | it is negative: it is added     |
| `mask`                                 | batch x token           | what its longest sample is not  |
| `attention_mask` of the first block    | batch x 1 x ... x token | no token may attend             |

Arguments may lie in dictionaries. A mask of another shape says which token sees which, not which are padding.

What a mask means is known where its library documents it. Of any other, one reading is taken if the opposite is not
possible: a sample has at least one token, and a token sees itself. Where both are, the `PaddingArgument` carries both,
and attention in the first block decides (`model_call.py`).

`call_follower.py` calls `arguments_of` for modules around the blocks; `model_call.py` calls `find_padding` when the
first block is entered; `plan.py` calls `is_decoder`; `monitor/inline.py` calls `mask_arguments_of`.
"""

import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from inspect import Parameter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rankscope.errors import WatchError, require

BLOCK_MASKS = ("attention_mask", "to_mask")  # of four axes, which a block takes
GIVE = "give padding= (True at padded tokens), or padding='none'"
WRAPPED = {"args", "inputs", "input", "kwargs"}  # arguments of modules that pass them on to another
DEEPEST = 3  # how deep dictionaries in dictionaries are searched
_forwards: "WeakKeyDictionary[type[nn.Module], tuple[Any, _Forward]]" = WeakKeyDictionary()


class MaskArgument(NamedTuple):
    """What an argument means that may say which tokens are padding, by a mask `[batch, token]`."""

    at_tokens: bool  # it is 1 at tokens, as a rule; else True at padding
    documented: Mapping[str, bool] = {}  # `at_tokens` in all models of a library, by the library that says so
    stack: str = ""  # "encoder" or "decoder" where it is about the tokens of that one alone
    ambiguous: bool = False  # it is as often meant the other way round, and counts where nothing else is found


MASKS = {  # the likeliest first
    "attention_mask": MaskArgument(True, {"transformers": True}),
    "input_mask": MaskArgument(True, {"transformers": False}),  # XLNet's
    "src_key_padding_mask": MaskArgument(False, {"torch": False}),
    "key_padding_mask": MaskArgument(False, {"torch": False}),
    "encoder_padding_mask": MaskArgument(False, stack="encoder"),
    "padding_mask": MaskArgument(False),
    "mask": MaskArgument(False, ambiguous=True),
    "decoder_attention_mask": MaskArgument(True, {"transformers": True}, "decoder"),
    "tgt_key_padding_mask": MaskArgument(False, {"torch": False}, "decoder"),
}


class PaddingArgument(NamedTuple):
    """An argument that says which tokens are padding: `[batch, token]`, True at padding, and its name."""

    padding: Tensor
    name: str
    opposite: Tensor | None = None  # the other way to read the mask, where both are possible

    def settled_by(self, unseen: Tensor | None) -> "PaddingArgument | None":
        """The reading that attention confirms, by the tokens `[batch, token]` that it hides from all; or None."""
        unseen = torch.zeros_like(self.padding) if unseen is None else unseen.to(self.padding.device)
        both = (self.padding, ~self.padding if self.opposite is None else self.opposite)
        readings = [x for x in both if torch.equal(x, unseen)]
        return PaddingArgument(readings[0], self.name) if readings else None


class CallArguments(dict[str, Any]):
    """What a module was called with, by name."""

    library = ""  # which documents what its masks of two axes mean
    of_interface = False  # masks of four axes are those of transformers' attention interface: True at what is seen
    of_images = False  # its tokens are of images, and not those that a mask of a module around it is about
    of_encoder_too = False  # the module holds the encoder as well: its usual masks are about that one's tokens


class _Forward:
    """The arguments of a `forward`, none if it has no signature. `inspect` binds them slowly, so that here they are
    bound where all have names."""

    def __init__(self, forward: Any) -> None:
        try:
            self.signature = inspect.signature(forward)
        except (TypeError, ValueError):
            self.signature = inspect.Signature()
        named, by_name, rest = (
            [name for name, argument in self.signature.parameters.items() if argument.kind is kind]
            for kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD)
        )
        self.positional, self.names, self.further = named, named + by_name, "".join(rest)
        self.all_named = len(self.names) + len(rest) == len(self.signature.parameters)

    @classmethod
    def of(cls, module: nn.Module) -> "_Forward":
        """What is known of a module's `forward`; that of a class is looked up once."""
        if "forward" in vars(module):
            return cls(module.forward)
        kind = type(module)
        known = _forwards.get(kind)
        if known is None or known[0] is not kind.forward:
            known = _forwards[kind] = kind.forward, cls(module.forward)
        return known[1]

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments by their names, in the order of the signature."""
        bound = dict(zip(self.positional, args, strict=False))
        bound.update((name, kwargs[name]) for name in self.names[len(args) :] if name in kwargs)
        further = {name: value for name, value in kwargs.items() if name not in bound}
        if not self.all_named or len(bound) + len(further) < len(args) + len(kwargs) or (further and not self.further):
            return self.signature.bind_partial(*args, **kwargs).arguments
        return bound | {self.further: further} if further else bound


def library_of(module: nn.Module) -> str:
    """The library that documents the masks `[batch, token]` which a module takes; empty for one's own modules."""
    if type(module).__module__.startswith("torch.nn."):
        return "torch"
    derived = any(kind.__module__.startswith("transformers.") for kind in type(module).__mro__)
    return "transformers" if derived else ""


def arguments_of(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallArguments:
    """What a module was called with, by the names in its `forward`; arguments not passed are left out."""
    try:
        bound = _Forward.of(module).arguments(args, kwargs)
    except TypeError:  # a forward without a signature, or a call that it will itself refuse
        bound = {}
    if bound.keys() <= WRAPPED and isinstance(inner := getattr(module, "module", None), nn.Module):
        return arguments_of(inner, args, kwargs)  # a wrapper, such as DistributedDataParallel
    arguments = CallArguments({**bound, **kwargs})
    arguments.library = library_of(module)
    arguments.of_interface = hasattr(sys.modules.get(type(module).__module__), "ALL_ATTENTION_FUNCTIONS")
    arguments.of_images = getattr(module, "main_input_name", None) == "pixel_values"
    if arguments.library == "torch":
        arguments.pop("mask", None)  # in torch's own modules it says which token sees which
    return arguments


def mask_arguments_of(module: nn.Module, decoder: bool, of_encoder_too: bool) -> list[tuple[str, int]]:
    """(name, position) of the arguments of a module's `forward` that may say which tokens are padding."""
    names = list(_Forward.of(module).signature.parameters)
    unclear = library_of(module) == "torch"  # in torch's own modules `mask` says which token sees which
    known = (name for name in _mask_names(decoder, of_encoder_too) if not (unclear and MASKS[name].ambiguous))
    return [(name, names.index(name)) for name in known if name in names]


def _mask_names(decoder: bool, of_encoder_too: bool) -> list[str]:
    """The names under which a module may be given the masks of the tokens of one stack in it, the likeliest first."""
    if not decoder:
        return [name for name, mask in MASKS.items() if mask.stack != "decoder"]
    stacks = ("decoder",) if of_encoder_too else ("decoder", "")
    return [name for stack in stacks for name, mask in MASKS.items() if mask.stack == stack]


def find_padding(
    calls: Sequence[Mapping[str, Any]], block: Mapping[str, Any], shape: Sequence[int], decoder: bool = False
) -> PaddingArgument | None:
    """The padding of tokens of this shape, if an argument says it: `calls` are those of the model and of modules around
    the blocks, from the outside in, `block` the first block's. A `decoder` beside an encoder has masks of its
    own: under names that say so, or given to a module around it alone."""
    calls = calls[max((k for k, call in enumerate(calls) if getattr(call, "of_images", False)), default=0) :]
    given = [(call, getattr(call, "of_encoder_too", True), True) for call in calls] + [(block, False, False)]
    masks = [
        (name, mask, MASKS[name].documented.get(getattr(call, "library", "")), of_call)
        for call, of_encoder_too, of_call in given
        for name, mask in _masks(call, _mask_names(decoder, of_encoder_too))
    ]
    fitting = [mask for mask in masks if mask[1].shape == tuple(shape)]
    clear, unclear = ([mask for mask in fitting if MASKS[mask[0]].ambiguous is which] for which in (False, True))
    if (argument := _reading(clear) or _hidden_from_all(block, shape) or _reading(unclear)) is not None:
        return argument
    for name, mask, _, of_call in masks:
        fault = f"{name} has {tuple(mask.shape)}: {GIVE}, or layout="
        sentence = f"the mask must have the shape of the tokens {tuple(shape)}; {fault}"
        require(MASKS[name].ambiguous or not of_call or _is_triangle(mask), sentence, WatchError, name)
    return None


def _masks(arguments: Any, names: Sequence[str], depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """(name, mask `[batch, token]`) under these names, outer ones first; of one sample `[1, token]`."""
    items = arguments.items() if isinstance(arguments, Mapping) else enumerate(arguments)
    deeper = []
    for name, value in items:
        if not isinstance(value, Tensor):
            if value is not None and isinstance(value, (list, tuple, Mapping)):
                deeper.append(value)
        elif name in names:
            mask = value.detach()[None] if value.ndim == 1 and "padding" in str(name) else value.detach()
            if mask.ndim == 2:
                yield str(name), mask
    if depth < DEEPEST:
        for value in deeper:
            yield from _masks(value, names, depth + 1)


def _is_triangle(mask: Tensor) -> bool:
    """True for a causal mask, which says which token sees which."""
    if mask.shape[0] != mask.shape[1] or len(mask) < 2:
        return False
    on, triangle = mask != 0, torch.ones_like(mask, dtype=torch.bool).tril()
    return any(x.equal(triangle) for x in (on, on.mT, ~on, ~on.mT))


def _is_added(mask: Tensor) -> bool:
    """True for a mask that is added to scores: floating, with numbers below zero or beyond those that tell kinds of
    tokens apart (Longformer: 0 for a token, a huge number for one that all see), or with nothing but zeros."""
    return mask.is_floating_point() and (bool(((mask < 0) | (mask > 2)).any()) or not bool(mask.any()))


def _reading(masks: Sequence[tuple[str, Tensor, bool | None, bool]]) -> PaddingArgument | None:
    """The first of these masks `[batch, token]`, read as padding; those whose meaning is documented go before others. A
    mask is (name, tensor, whether its library says that it is 1 at tokens, ...)."""
    for name, mask, documented, _ in sorted(masks, key=lambda mask: mask[2] is None):
        if documented is None and _is_triangle(mask):
            continue
        if _is_added(mask):
            return PaddingArgument(mask < 0, name)
        padding = mask == 0 if (MASKS[name].at_tokens if documented is None else documented) else mask != 0
        if documented is not None:
            return PaddingArgument(padding, name)
        if bool(padding.all()):  # then there would be nothing to compute
            return PaddingArgument(~padding, name)
        certain = _has_tokens(padding) and not _has_tokens(~padding)
        return PaddingArgument(padding, name, None if certain else ~padding)
    return None


def _has_tokens(padding: Tensor) -> bool:
    """True if every sample has a token."""
    return not bool(padding.all(-1).any())


def _hidden_from_all(block: Mapping[str, Any], shape: Sequence[int]) -> PaddingArgument | None:
    """Padding in the mask of four axes that a block takes: the tokens that no token may attend to."""
    for name in BLOCK_MASKS:
        mask = block.get(name)
        if not isinstance(mask, Tensor) or mask.ndim != 4 or (mask.shape[0], mask.shape[-1]) != tuple(shape):
            continue
        mask = mask.detach()
        if _is_added(mask):
            return PaddingArgument((mask < -1e3).flatten(1, 2).all(1), name)
        (seen, possible), (unseen, opposite_possible) = map(_of_visible, (mask != 0, mask == 0))
        certain = getattr(block, "of_interface", False) or name == "to_mask"
        if certain or (possible and not opposite_possible):
            return PaddingArgument(seen, name)
        if opposite_possible and not possible:
            return PaddingArgument(unseen, name)
        return PaddingArgument(seen, name, unseen)
    return None


def _of_visible(visible: Tensor) -> tuple[Tensor, bool]:
    """(padding, whether that is possible) of a mask `[batch, head or 1, query or 1, key]` that is True at what a token
    sees: tokens that none sees are padding, every sample has others, and these see themselves."""
    padding = ~visible.flatten(1, 2).any(1)
    square = visible.shape[-2] == visible.shape[-1]
    sees_itself = visible.diagonal(dim1=-2, dim2=-1).any(1) if square else ~padding
    return padding, _has_tokens(padding) and bool((padding | sees_itself).all())


def is_decoder(model: nn.Module, stack: str) -> bool:
    """True if this stack is the decoder of a model that is called with masks for encoder and decoder."""
    names = _Forward.of(model).signature.parameters.keys()
    both = any(name in names for name, mask in MASKS.items() if mask.stack == "decoder")
    return both and (is_decoder_name(stack) or names.isdisjoint(("attention_mask", "src_key_padding_mask")))


def is_decoder_name(stack: str) -> bool:
    """True if the name of a stack says that it is a decoder.

    >>> [is_decoder_name(name) for name in ("model.decoder.layers", "dec_blocks", "decay.layers", "encoder.block")]
    [True, True, False, False]
    """
    return any(word == "dec" or word.startswith("decoder") for word in re.split(r"[._]", stack.lower()))


def continues_from_cache(arguments: Mapping[str, Any]) -> bool:
    """True if a call continues from a cache, so that its tokens attend to more than themselves."""
    cache = arguments.get("past_key_values")
    if cache is None:
        return False
    length = getattr(cache, "get_seq_length", None)
    if not callable(length):
        return bool(cache)
    try:
        return int(length()) > 0
    except ValueError:  # a cache without a length, as mamba's
        return False

"""Flex attention, seen where a module calls `torch.nn.attention.flex_attention.flex_attention`.

It compiles itself, so a torch function mode does not see into it. While a model is watched, names that hold
the function, in files of the packages that the blocks are written in or in the blocks themselves, hold one
that calls it and looks at its arguments and at what it gave; afterwards they hold what they held. The
weights are computed beside, as torch documents them:

    P = softmax(score_mod(Q K' scale)),   over the tokens that mask_mod lets a token see
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.live.functions import Attention, Functions

MODULE = "torch.nn.attention.flex_attention"

_listening: dict[Functions, None] = {}
_places: dict[tuple[int, str], tuple[Any, str, Any, int]] = {}
"""Names that hold a look now: where, the name, what it held, and for how many watches."""


class Flex(Attention):
    """One call of flex attention: its arguments, by torch's names, and what it gave."""

    def __init__(
        self,
        output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Callable[..., Tensor] | None = None,
        block_mask: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        *others: Any,
        **named: Any,
    ) -> None:
        super().__init__(output, query, key, value, scale=scale, enable_gqa=enable_gqa)
        self.score_mod, self.block_mask = score_mod, block_mask

    def _modified(self, scores: Tensor) -> Tensor:
        if self.score_mod is None:
            return scores
        modified: Any = self.score_mod
        for axis in reversed(range(4)):  # of the four indices, the last one first
            modified = torch.vmap(modified, (0, *(0 if k == axis else None for k in range(4))))
        places = [torch.arange(n, dtype=torch.int, device=scores.device) for n in scores.shape]
        return modified(scores, *places)

    def _mask(self) -> Tensor | None:
        if self.block_mask is None:
            return None
        from torch.nn.attention.flex_attention import create_mask

        sizes = (*self.query.shape[:3], self.key.shape[2])
        return create_mask(self.block_mask.mask_mod, *sizes, device=str(self.query.device))


@contextmanager
def flexible(blocks: Sequence[nn.Module], functions: Functions) -> Iterator[None]:
    """Inside, flex attention is shown to `functions` while a block runs."""
    found = [_hold(*each) for each in _holders(blocks)]
    _listening[functions] = None
    try:
        yield
    finally:
        _listening.pop(functions)
        for key in found:
            holder, name, held, number = _places.pop(key)
            if number > 1:
                _places[key] = (holder, name, held, number - 1)
            else:
                setattr(holder, name, held)


def _holders(blocks: Sequence[nn.Module]) -> list[tuple[Any, str, Any]]:
    """Every name that holds the function, plain, compiled or looked at: in torch's own file, in those of the
    packages that the blocks are written in, and in the blocks. None where nobody imported it."""
    own = sys.modules.get(MODULE)
    if own is None:
        return []
    plain = _original(own.flex_attention)
    parts = dict.fromkeys(part for block in blocks for part in block.modules())
    written = {each.__module__.partition(".")[0] for part in parts for each in type(part).__mro__}
    packages = (written | {"__main__"}) - {"torch", "builtins"}
    files = [each for path, each in list(sys.modules.items()) if path.partition(".")[0] in packages]
    holders = {id(each): each for each in (own, *files, *parts)}
    return [
        (holder, name, value)
        for holder in holders.values()
        for name, value in list(getattr(holder, "__dict__", {}).items())
        if type(value) is FunctionType and _original(value) is plain
    ]


def _original(function: Any) -> Any:
    """The function that a look, or compiled code, stands for."""
    inner = vars(function)
    if "_looks_at" in inner:
        return _original(inner["_looks_at"])
    return inner.get("_torchdynamo_orig_callable", function)


def _hold(holder: Any, name: str, value: Any) -> tuple[int, str]:
    key = (id(holder), name)
    if key in _places:
        _, _, held, number = _places[key]
        _places[key] = (holder, name, held, number + 1)
    else:
        _places[key] = (holder, name, value, 1)
        setattr(holder, name, _with_a_look(value))
    return key


def _with_a_look(function: Any) -> Any:
    @wraps(function)
    def attend(*args: Any, **named: Any) -> Any:
        found = function(*args, **named)
        if not torch.compiler.is_compiling():
            output = found[0] if isinstance(found, tuple) else found
            with torch._C.DisableTorchFunction():  # what is computed beside is none of the model's calls
                for each in _listening:
                    each.called(Flex(output, *args, **named))
        return found

    attend._looks_at = function  # type: ignore[attr-defined]
    return attend

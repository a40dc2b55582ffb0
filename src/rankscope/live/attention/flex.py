"""Flex attention, seen where a module calls `torch.nn.attention.flex_attention.flex_attention`.

It compiles itself, so a torch function mode does not see into it. While a model is watched, names that hold
the function, in files of the packages that the blocks are written in or in the blocks themselves, hold one
that calls it and reports its arguments and its output; afterwards they hold what they held. The pattern is
computed a second time, as torch documents it:

    P = softmax(score_mod(Q K' scale)),   over the keys that mask_mod lets a query see

Called by `torch_functions.py`.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.live.attention.scaled_dot_product import ScaledDotProduct

MODULE = "torch.nn.attention.flex_attention"

OnFlexAttention = Callable[["FlexAttention"], None]
_callbacks: list[OnFlexAttention] = []
_replaced: dict[tuple[int, str], tuple[Any, str, Any, int]] = {}
"""Names whose function is replaced now: their holder, the name, the function, and for how many watches."""


class FlexAttention(ScaledDotProduct):
    """The output of a call of flex attention, and its arguments under torch's names and with torch's meaning.

    `options` do not change the result.
    """

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
        *options: Any,
        **named_options: Any,
    ) -> None:
        super().__init__(output, query, key, value, scale=scale, enable_gqa=enable_gqa)
        self.score_mod, self.block_mask = score_mod, block_mask

    def _modified(self, scores: Tensor) -> Tensor:
        """The scores after `score_mod`, a function of one score and its four indices, mapped over all."""
        if self.score_mod is None:
            return scores
        modified: Any = self.score_mod
        for axis in reversed(range(4)):  # the last of the four indices first
            modified = torch.vmap(modified, (0, *(0 if k == axis else None for k in range(4))))
        indices = [torch.arange(n, dtype=torch.int, device=scores.device) for n in scores.shape]
        return modified(scores, *indices)

    def _mask(self) -> Tensor | None:
        """The mask `[batch, head, query, key]` that `mask_mod` describes, True where a query sees a key."""
        if self.block_mask is None:
            return None
        from torch.nn.attention.flex_attention import create_mask

        sizes = (*self.query.shape[:3], self.key.shape[2])
        return create_mask(self.block_mask.mask_mod, *sizes, device=str(self.query.device))


@contextmanager
def flex_attention_reported(blocks: Sequence[nn.Module], callback: OnFlexAttention) -> Iterator[None]:
    """Inside, every call of flex attention in the files and modules of the blocks is handed to `callback`."""
    keys = [_replace(*holder) for holder in _holders(blocks)]
    _callbacks.append(callback)
    try:
        yield
    finally:
        _callbacks.remove(callback)
        for key in keys:
            holder, name, function, watches = _replaced.pop(key)
            if watches > 1:
                _replaced[key] = (holder, name, function, watches - 1)
            else:
                setattr(holder, name, function)


def _holders(blocks: Sequence[nn.Module]) -> list[tuple[Any, str, Any]]:
    """(holder, name, function) wherever a name holds flex attention, plain, compiled or replaced.

    Searched are torch's own file, the files of the packages that the blocks' classes are written in, and the
    modules in the blocks. Empty if nobody imported flex attention.
    """
    torch_file = sys.modules.get(MODULE)
    if torch_file is None:
        return []
    flex_attention = _original(torch_file.flex_attention)
    modules = dict.fromkeys(part for block in blocks for part in block.modules())
    written = {kind.__module__.partition(".")[0] for part in modules for kind in type(part).__mro__}
    packages = (written | {"__main__"}) - {"torch", "builtins"}
    files = [file for path, file in list(sys.modules.items()) if path.partition(".")[0] in packages]
    holders = {id(holder): holder for holder in (torch_file, *files, *modules)}
    return [
        (holder, name, value)
        for holder in holders.values()
        for name, value in list(getattr(holder, "__dict__", {}).items())
        if type(value) is FunctionType and _original(value) is flex_attention
    ]


def _original(function: Any) -> Any:
    """The function that a reporting or a compiled one was made from; any other as it is."""
    attributes = vars(function)
    if "_reports" in attributes:
        return _original(attributes["_reports"])
    return attributes.get("_torchdynamo_orig_callable", function)


def _replace(holder: Any, name: str, function: Any) -> tuple[int, str]:
    """Let a name hold the function that reports, and count the watches that need it; gives the key."""
    key = (id(holder), name)
    if key in _replaced:
        _, _, original, watches = _replaced[key]
        _replaced[key] = (holder, name, original, watches + 1)
    else:
        _replaced[key] = (holder, name, function, 1)
        setattr(holder, name, _reporting(function))
    return key


def _reporting(function: Any) -> Any:
    """Flex attention that, after it ran, hands its call to everyone in `_callbacks`."""

    @wraps(function)
    def attend(*args: Any, **named: Any) -> Any:
        result = function(*args, **named)
        if not torch.compiler.is_compiling():
            output = result[0] if isinstance(result, tuple) else result
            with torch._C.DisableTorchFunction():  # computing the pattern is none of the model's own calls
                for callback in _callbacks:
                    callback(FlexAttention(output, *args, **named))
        return result

    attend._reports = function  # type: ignore[attr-defined]
    return attend

"""Calls of torch's attention kernels, from which the pattern is computed a second time, as documented:

    P = softmax(Q K' scale + mask)            `F.scaled_dot_product_attention`, without dropout
    P = softmax(score_mod(Q K' scale))        flex attention, over the keys that mask_mod lets a query see

That P V is what the call gave is checked every time. `torch_functions.py` makes a `ScaledDotProduct` for each call that
it intercepts. Flex attention compiles itself, so a torch function mode does not see into it: while a model is watched
(`flex_attention_reported`), names that hold the function, plain, compiled or replaced, in torch's own file, in files of
the packages that the blocks are written in or in the blocks, hold one that calls it and reports its call.
"""

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import wraps
from pkgutil import resolve_name
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rankscope.live.attention.head_outputs import by_head, check_pattern, values_product
from rankscope.live.attention.observer import Products
from rankscope.live.attention.row_statistics import HELD
from rankscope.live.attention.scores import AttentionScores
from rankscope.live.hooks import Replacements, isolated
from rankscope.live.modules import submodules
from rankscope.live.processes import local_part

OnFlexAttention = Callable[["FlexAttention"], None]
_reports = Replacements()  # names that hold flex attention hold one that reports its calls


class ScaledDotProduct:
    """The output of a call, and its arguments under torch's names and with torch's meaning: those that may be given by
    their `positions`, and others by name."""

    positions: ClassVar[tuple[str, ...]] = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    altered_by: str | None = None  # nothing comes between this pattern and its values
    by_kernel = True

    def __init__(self, output: Tensor, *args: Any, **named: Any) -> None:
        options = dict(zip(self.positions, args, strict=False)) | named
        query, key, value = (options[name] for name in ("query", "key", "value"))
        self.given = (output, query, key)  # of a `DTensor` this process has some heads, which it attends with
        self.output, self.query, self.key, self.value = map(local_part, (output, query, key, value))
        self.mask, self.dropout = options.get("attn_mask"), options.get("dropout_p", 0.0)
        self.causal, self.scale = options.get("is_causal", False), options.get("scale")
        self.grouped = options.get("enable_gqa", False)
        self.score_mod, self.block_mask = options.get("score_mod"), options.get("block_mask")  # of flex attention

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The numbers of samples, queries and keys."""
        samples = self.query.shape[0] if self.query.ndim > 2 else 1
        return samples, self.query.shape[-2], self.key.shape[-2]

    @property
    def head_width(self) -> int:
        """The number of entries of a head's values."""
        return self.value.shape[-1]

    def pattern(self) -> Tensor:
        """The attention pattern `[batch, head, query, key]`, in float32 or wider, checked against the output."""
        with isolated(self.query.device):
            scores, values = self.scores(), self._values()
            scale = 1 / math.sqrt(scores.query.shape[-1]) if self.scale is None else self.scale
            scores = replace(scores, scale=scale, key=self._for_all_heads(scores.key))
            s = scores.rows(torch.arange(self.sizes[1], device=self.query.device))
            blind = (s == -torch.inf).all(-1, keepdim=True)  # a query that sees no key gets zeros
            P = s.softmax(-1).masked_fill_(blind, 0.0)
            if not self.dropout:
                check_pattern(P, self._for_all_heads(values), by_head(self.output), "torch's attention")
            return P

    def head_outputs(self) -> Tensor:
        """The output of each head `[batch, query, head, d]`."""
        return by_head(self.output.detach()).transpose(1, 2)

    def hidden_tokens(self) -> Tensor | None:
        """`[batch, token]`: True at keys that the mask hides from all queries; None without such."""
        if self.mask is None or self.mask.ndim < 3:  # the same for every sample: no padding
            return None
        mask = self.mask.detach()[(None,) * (self.query.ndim - self.mask.ndim)]
        unseen = (mask < -1e3 if mask.is_floating_point() else ~mask).all(-2)
        unseen = unseen.flatten(1, -2).all(1) if unseen.ndim > 2 else unseen
        return unseen.expand(self.sizes[0], self.sizes[2])

    def scores(self) -> AttentionScores:
        """How the kernel made its scores."""
        query, key = self._taken(self.query), self._taken(self.key)
        samples = self.output.shape[:-2]
        query = query.expand(*samples, *query.shape[-2:])
        key = key if self.grouped else key.expand(*samples, *key.shape[-2:])
        mask, offset = self.mask, 0
        causal, variant = self.causal, getattr(self.mask, "variant", None)
        if variant is not None:  # a causal bias of torch.nn.attention.bias, which need not be made
            mask, causal = None, True
            offset = key.shape[-2] - query.shape[-2] if variant.name == "LOWER_RIGHT" else 0
        mask = None if mask is None else mask.detach()
        if mask is not None and mask.ndim > 2 and self.output.ndim != 4:  # with the axes of scores, or fewer
            shared = all(size == 1 for size in mask.shape[1:-2]) and mask.ndim == self.output.ndim
            mask = by_head(mask if shared else mask.expand(*samples, *mask.shape[-2:]))
        options: Any = {"scale": self.scale, "causal": causal, "offset": offset, "modified": self._rows_modified()}
        return AttentionScores(query=by_head(query), key=by_head(key), mask=mask, **options)

    @property
    def products(self) -> Products | None:
        """What rows of a pattern give beside what the kernel gave; None with dropout."""
        return None if self.dropout else lambda rows, P: values_product(self._values(), self.head_outputs())(rows, P)

    def _values(self) -> Tensor:
        """The values `[batch, group, key, d]`."""
        value = self._taken(self.value)
        return by_head(value if self.grouped else value.expand(*self.output.shape[:-2], *value.shape[-2:]))

    def _for_all_heads(self, x: Tensor) -> Tensor:
        """Keys or values `[batch, group, key, d]`, those of a group once for each of its heads."""
        return x.repeat_interleave(self.query.shape[-3] // x.shape[1], 1) if self.grouped else x

    def _rows_modified(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """What changes scores of some rows, beside scale and mask; flex attention has it."""
        return None

    def _taken(self, x: Tensor) -> Tensor:
        """x as the kernel took it under autocast."""
        return x.detach().to(self.output.dtype)


class FlexAttention(ScaledDotProduct):
    """The output and arguments of a call of flex attention; `options` do not change the result."""

    positions = ("query", "key", "value", "score_mod", "block_mask", "scale", "enable_gqa")

    def _rows_modified(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """`score_mod`, then minus infinity where `mask_mod` says that a query does not see a key."""

        def modified(scores: Tensor, at: Tensor) -> Tensor:
            changed = scores if self.score_mod is None else over_scores(self.score_mod, scores, at, given=True)
            return changed if self.block_mask is None else only_seen(self.block_mask.mask_mod, changed, at)

        return None if self.score_mod is None and self.block_mask is None else modified

    def hidden_tokens(self) -> Tensor | None:
        """`[batch, token]`: True at keys that `mask_mod` hides from all queries, looked at some rows at a time."""
        if self.block_mask is None:
            return None
        batch, heads, queries, keys = (*self.query.shape[:3], self.key.shape[2])
        seen = torch.zeros(batch, keys, dtype=torch.bool, device=self.query.device)
        several = max(1, HELD // (batch * heads * keys))
        for at in torch.split(torch.arange(queries, device=seen.device), several):
            rows = seen.new_empty(()).expand(batch, heads, len(at), keys)
            seen |= over_scores(self.block_mask.mask_mod, rows, at, given=False).flatten(1, 2).any(1)
        return ~seen


def only_seen(mask_mod: Callable[..., Tensor], scores: Tensor, at: Tensor) -> Tensor:
    """Scores of the queries at these positions, minus infinity where `mask_mod` of flex attention, a function of the
    four indices of a score, says that a query does not see a key."""
    return scores.masked_fill(~over_scores(mask_mod, scores, at, given=False), -torch.inf)


def over_scores(function: Callable[..., Tensor], scores: Tensor, at: Tensor, given: bool) -> Tensor:
    """A function of the four indices of a score, and before them, if `given`, of the score, mapped over all scores
    `[batch, head, row, key]` of the queries at these positions; None for all queries."""
    mapped: Any = function
    for axis in reversed(range(4)):  # the last of the four indices first
        indices = (0 if k == axis else None for k in range(4))
        mapped = torch.vmap(mapped, (*((0,) if given else ()), *indices))
    positions = [torch.arange(size, dtype=torch.int, device=scores.device) for size in scores.shape]
    positions[2] = at.to(torch.int)
    return mapped(*((scores,) if given else ()), *positions)


def flex_attention_reported(blocks: Sequence[nn.Module], callback: OnFlexAttention) -> AbstractContextManager[None]:
    """Inside, every call of flex attention in the files and modules of the blocks is handed to `callback`."""
    replacements = []
    for holder, name, function in _holders(blocks):
        attend = _reporting(function)
        inside = isinstance(holder, nn.Module)
        replacements.append((holder, name, ReportingFunction(attend, function) if inside else attend))
    return _reports.heard_by(callback, replacements)


def _holders(blocks: Sequence[nn.Module]) -> list[tuple[Any, str, Any]]:
    """(holder, name, function) wherever a name that blocks may use holds flex attention; empty if none does."""
    torch_file = sys.modules.get("torch.nn.attention.flex_attention")
    if torch_file is None:
        return []
    flex_attention = _original(torch_file.flex_attention)
    modules = submodules(*blocks)
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
    if "_reported_function" in attributes:
        return _original(attributes["_reported_function"])
    return attributes.get("_torchdynamo_orig_callable", function)


class ReportingFunction:
    """A function that reports its calls, to be an attribute of a module; copied or pickled, it is the `original`."""

    def __init__(self, reporting: Any, original: Any) -> None:
        self.reporting, self.original = reporting, original

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Call the function and return what it returns."""
        return self.reporting(*args, **named)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.original

    def __reduce__(self) -> Any:
        return resolve_name, (f"{self.original.__module__}:{self.original.__qualname__}",)


def _reporting(function: Any) -> Any:
    """Flex attention that, after it ran, hands its call to everyone who listens."""

    @wraps(function)
    def attend(*args: Any, **named: Any) -> Any:
        result = function(*args, **named)
        if not torch.compiler.is_compiling():
            output = result[0] if isinstance(result, tuple) else result
            with torch._C.DisableTorchFunction():  # computing the pattern is none of the model's own calls
                for callback in _reports.listeners:
                    callback(FlexAttention(output, *args, **named))
        return result

    attend._reported_function = function  # type: ignore[attr-defined]
    return attend

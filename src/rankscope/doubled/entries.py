"""Rules on pairs for torch's operations that move, choose or make entries; `TABLE` holds all rules."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rankscope.doubled.pairs import Pair, no_type_check

aten = torch.ops.aten
Rule = Callable[..., Any]
Number = int | float
TABLE: dict[Any, Rule] = {}


def rule(*operations: Any) -> Callable[[Rule], Rule]:
    """Decorator that enters a function on pairs into `TABLE` as the rule of these torch operations."""

    def register(function: Rule) -> Rule:
        TABLE.update(dict.fromkeys(operations, function))
        return function

    return register


@no_type_check
def paired(value: Any, like: Pair | None = None) -> Pair:
    """A tensor or a Python number as a pair, its value unchanged; a number goes to the device of `like`."""
    if isinstance(value, Pair):
        return value
    if isinstance(value, Tensor):
        return Pair(value.to(torch.float64))
    return Pair(
        torch.tensor(float(value), dtype=torch.float64, device=None if like is None else like.hi.device)
    )


@no_type_check
def together(a: Any, b: Any) -> tuple[Pair, Pair]:
    """Both operands as pairs; one of them may be a tensor or a number."""
    like = a if isinstance(a, Pair) else b
    return paired(a, like), paired(b, like)


# Entries moved, chosen or repeated: the same for hi and for lo.


@no_type_check
def _part(value: Any, low: bool) -> Any:
    """hi of every pair in an argument, or lo; other tensors have a lo of zero."""
    if isinstance(value, Pair):
        return value.low if low else value.hi
    if low and isinstance(value, Tensor) and value.is_floating_point():
        return value.new_zeros(()).expand(value.shape)
    if isinstance(value, (list, tuple)):
        return [_part(item, low) for item in value]
    return value


@no_type_check
def _exact(value: Any) -> bool:
    """True if no pair in the argument has a lo."""
    if isinstance(value, Pair):
        return value.lo is None
    return not isinstance(value, (list, tuple)) or all(map(_exact, value))


def moving(operation: Callable[..., Any]) -> Rule:
    """The rule of an operation that moves entries and computes nothing: the same is done to hi and to lo."""

    @no_type_check
    def function(*args: Any, **kwargs: Any) -> Any:
        hi = operation(*_part(args, False), **kwargs)
        lo = None if _exact(args) else operation(*_part(args, True), **kwargs)
        if isinstance(hi, Tensor):
            return Pair(hi, lo)
        return [Pair(*halves) for halves in zip(hi, lo or [None] * len(hi), strict=True)]

    return function


for moved in (
    aten.alias.default, aten.cat.default, aten.detach.default, aten.diagonal.default, aten.expand.default,
    aten.flip.default, aten.gather.default, aten.index.Tensor, aten.index_select.default,
    aten.permute.default, aten.repeat.default, aten.roll.default, aten.scatter.src, aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor, aten.split_with_sizes.default, aten.squeeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.stack.default, aten.t.default, aten.transpose.int, aten.tril.default,
    aten.triu.default, aten.unbind.int, aten.unfold.default, aten.unsqueeze.default, aten.where.self,
    aten.masked_select.default, aten.take_along_dim.default, aten.repeat_interleave.self_int,
):  # fmt: skip
    TABLE[moved] = moving(moved)
for viewed in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
    TABLE[viewed] = moving(torch.reshape)  # hi and lo need not lie in memory alike


@rule(aten.clone.default)
def clone(x: Pair, **kwargs: Any) -> Pair:
    """A copy that may be written into."""
    return Pair(aten.clone.default(x.hi, **kwargs), aten.clone.default(x.low, **kwargs))


@rule(aten._to_copy.default)
def moved_to(x: Pair, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    """The pair on another device, or as truth values; rounding to fewer digits is refused."""
    if dtype is torch.bool:
        return x.hi != 0
    if dtype not in (None, torch.float64):
        raise NotImplementedError(
            f"doubled precision is not rounded to {dtype} by the way: use to_float64() first"
        )
    return x.mapped(lambda t: aten._to_copy.default(t, **kwargs))


# New tensors, and constants written over entries.


def _made(operation: Any) -> Rule:
    """The rule of an operation that makes a new tensor like another: its lo is zero."""

    @no_type_check
    def function(x: Pair, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        hi = operation(x.hi, *args, dtype=dtype, **kwargs)
        return Pair(hi, torch.zeros_like(hi)) if hi.dtype is torch.float64 else hi

    return function


for made in (
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default,
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default,
):  # fmt: skip
    TABLE[made] = _made(made)


@rule(aten.masked_fill.Scalar)
def masked_fill(x: Pair, mask: Tensor, value: Number) -> Pair:
    """The pair with a number in place of the entries under the mask."""
    return Pair(x.hi.masked_fill(mask, value), None if x.lo is None else x.lo.masked_fill(mask, 0.0))


@rule(aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def choose(pick: Tensor, a: Any, b: Any) -> Pair:
    """Entries of a where `pick` is true, else of b."""
    a, b = together(a, b)
    return Pair(torch.where(pick, a.hi, b.hi), torch.where(pick, a.low, b.low))


@rule(aten.fill.Scalar)
def fill(x: Pair, value: Number) -> Pair:
    """A pair of the same shape with one number everywhere."""
    return Pair(torch.full_like(x.hi, value), torch.zeros_like(x.hi))


@rule(aten.copy.default)
def copied(x: Pair, source: Any, non_blocking: bool = False) -> Pair:
    """The entries of `source`, to be written into x."""
    return paired(source, x)


TABLE |= {
    aten.masked_fill.Tensor: lambda x, mask, value: choose(mask, paired(value, x), x),
    aten.scatter.value: lambda x, dim, index, value: Pair(
        x.hi.scatter(dim, index, value), None if x.lo is None else x.lo.scatter(dim, index, 0.0)
    ),
}

"""Rules on pairs for torch's operations: `TABLE`, into which `Doubled` looks, and `WRITTEN`."""

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from rankscope.doubled import functions, reductions
from rankscope.doubled.matmul import product
from rankscope.doubled.pairs import Pair, add, divide, multiply, negative, no_type_check, scaled, sqrt, subtract, where

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
    return Pair(torch.tensor(float(value), dtype=torch.float64, device=None if like is None else like.hi.device))


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
        raise NotImplementedError(f"doubled precision is not rounded to {dtype} by the way: use to_float64() first")
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
    return where(pick, *together(a, b))


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


# Sums, products and powers.


@rule(aten.add.Tensor, aten.add.Scalar)
def plus(a: Any, b: Any, *, alpha: Number = 1) -> Pair:
    """The sum a + alpha b."""
    a, b = together(a, b)
    return add(a, b if alpha == 1 else multiply(b, paired(alpha, b)))


@rule(aten.sub.Tensor, aten.sub.Scalar)
def minus(a: Any, b: Any, *, alpha: Number = 1) -> Pair:
    """The difference a - alpha b."""
    return subtract(*together(a, b)) if alpha == 1 else plus(a, b, alpha=-alpha)


@rule(aten.mul.Tensor, aten.mul.Scalar)
def times(a: Any, b: Any) -> Pair:
    """The product a b, entry by entry."""
    return multiply(*together(a, b))


@rule(aten.div.Tensor, aten.div.Scalar)
def over(a: Any, b: Any) -> Pair:
    """The quotient a / b, entry by entry."""
    return divide(*together(a, b))


@rule(aten.addcmul.default)
def plus_product(x: Any, a: Any, b: Any, *, value: Number = 1) -> Pair:
    """The sum x + value a b, entry by entry."""
    return plus(x, times(a, b), alpha=value)


@rule(aten.reciprocal.default)
def reciprocal(x: Pair) -> Pair:
    """The reciprocal 1 / x of a pair."""
    return divide(paired(1.0, x), x)


@rule(aten.pow.Tensor_Scalar)
def power(x: Pair, exponent: Number) -> Pair:
    """Whole powers by products, and the root."""
    if exponent == 0.5:
        return sqrt(x)
    if exponent != int(exponent) or abs(exponent) > 64:
        raise NotImplementedError(f"doubled precision has whole powers up to 64 and the root; got the power {exponent}")
    if exponent == 0:
        return paired(torch.ones_like(x.hi))
    raised = reduce(multiply, [x] * abs(int(exponent)))
    return raised if exponent > 0 else reciprocal(raised)


@rule(aten.mm.default, aten.bmm.default)
def matrix_product(A: Any, B: Any) -> Pair:
    """The product A B of matrices, or of batches of them."""
    return product(*together(A, B))


@rule(aten.addmm.default, aten.baddbmm.default)
def plus_matrix_product(x: Any, A: Any, B: Any, *, beta: Number = 1, alpha: Number = 1) -> Pair:
    """The sum beta x + alpha A B."""
    return plus(x if beta == 1 else times(x, beta), matrix_product(A, B), alpha=alpha)


# Functions of entries and along axes.

TABLE |= {
    aten.rsub.Scalar: lambda a, b, alpha=1: minus(b, a, alpha=alpha),
    aten.rsub.Tensor: lambda a, b, *, alpha=1: minus(b, a, alpha=alpha),
    aten.mv.default: lambda A, v: matrix_product(A, paired(v).mapped(lambda t: t[:, None])).mapped(torch.ravel),
    aten.dot.default: lambda u, v: reductions.total(times(u, v)),
    aten.neg.default: negative,
    aten.abs.default: reductions.absolute,
    aten.sqrt.default: sqrt,
    aten.exp.default: functions.exp,
    aten.expm1.default: functions.expm1,
    aten.log.default: functions.log,
    aten.log1p.default: functions.log1p,
    aten.sigmoid.default: functions.sigmoid,
    aten.tanh.default: functions.tanh,
    aten.erfc.default: functions.erfc,
    aten.special_erfc.default: functions.erfc,
    aten.silu.default: lambda x: multiply(x, functions.sigmoid(x)),
    aten.relu.default: lambda x: x.mapped(lambda t: t.masked_fill(x.hi < 0, 0.0)),
    aten.square.default: lambda x: multiply(x, x),
    aten.rsqrt.default: lambda x: reciprocal(sqrt(x)),
    aten.amax.default: reductions.largest,
    aten.amin.default: reductions.smallest,
    aten.max.default: reductions.largest,
    aten.min.default: reductions.smallest,
    aten.argmax.default: reductions.index_of_largest,
    aten.argmin.default: lambda x, *axes: reductions.index_of_largest(negative(x), *axes),
    aten.ldexp.Tensor: lambda x, exponent: scaled(x, exponent.long()),
    aten.frexp.Tensor: lambda x: [scaled(x, -torch.frexp(x.hi)[1].long()), torch.frexp(x.hi)[1]],
    aten.sum.default: lambda x, dtype=None: reductions.total(x),
    aten.sum.dim_IntList: lambda x, dim=None, keepdim=False, dtype=None: reductions.total(x, dim, keepdim),
    aten.mean.default: lambda x, dtype=None: reductions.mean(x),
    aten.mean.dim: lambda x, dim=None, keepdim=False, dtype=None: reductions.mean(x, dim, keepdim),
    aten.linalg_vector_norm.default: lambda x, *axes, dtype=None: reductions.norm(x, *axes),
    aten.logsumexp.default: reductions.logsumexp,
    aten._log_softmax.default: lambda x, dim, half: reductions.log_softmax(x, dim),
    aten._softmax.default: lambda x, dim, half: reductions.softmax(x, dim),
    aten.nan_to_num.default: lambda x, *args, **values: Pair(x.hi.nan_to_num(*args, **values), x.lo),
    aten._local_scalar_dense.default: lambda x: x.hi.item(),
}
for by_hi in (aten.isnan, aten.isfinite, aten.isinf, aten.any, aten.all, aten.sign):
    TABLE[by_hi.default] = lambda x, *args, of=by_hi.default: of(x.hi, *args)
for by_hi in (aten.any, aten.all):
    TABLE[by_hi.dim] = lambda x, *args, of=by_hi.dim: of(x.hi, *args)


# Comparisons, by hi and then by lo, and what follows from them.


def _compared(strict: Callable[[Any, Any], Tensor], last: Callable[[Any, Any], Tensor]) -> Rule:
    """A comparison: `strict` of hi, and where these are equal `last` of lo."""

    @no_type_check
    def function(a: Any, b: Any) -> Tensor:
        a, b = together(a, b)
        return strict(a.hi, b.hi) | ((a.hi == b.hi) & last(a.low, b.low))

    return function


less = _compared(operator.lt, operator.lt)
for name, compare in {
    "lt": less,
    "le": _compared(operator.lt, operator.le),
    "gt": _compared(operator.gt, operator.gt),
    "ge": _compared(operator.gt, operator.ge),
    "eq": _compared(lambda a, b: torch.zeros_like(a == b), operator.eq),
    "ne": _compared(operator.ne, operator.ne),
}.items():
    TABLE[getattr(aten, name).Tensor] = TABLE[getattr(aten, name).Scalar] = compare


@rule(aten.maximum.default, aten.clamp_min.default, aten.clamp_min.Tensor)
def maximum(a: Any, b: Any) -> Pair:
    """The larger of two; nan of nan."""
    a, b = together(a, b)
    return choose(less(a, b) | b.hi.isnan(), b, a)


@rule(aten.minimum.default, aten.clamp_max.default, aten.clamp_max.Tensor)
def minimum(a: Any, b: Any) -> Pair:
    """The smaller of two; nan of nan."""
    a, b = together(a, b)
    return choose(less(b, a) | b.hi.isnan(), b, a)


@rule(aten.clamp.default, aten.clamp.Tensor)
def clamp(x: Any, min: Any = None, max: Any = None) -> Pair:
    """x, not below min and not above max."""
    x = x if min is None else maximum(x, min)
    return paired(x) if max is None else minimum(x, max)


WRITTEN = {
    aten.add_.Tensor: plus,
    aten.sub_.Tensor: minus,
    aten.mul_.Tensor: times,
    aten.div_.Tensor: over,
    aten.addcmul_.default: plus_product,
    aten.masked_fill_.Scalar: masked_fill,
    aten.fill_.Scalar: fill,
    aten.fill_.Tensor: copied,
    aten.copy_.default: copied,
    aten.zero_.default: lambda x: fill(x, 0.0),
    aten.neg_.default: negative,
    aten.exp_.default: functions.exp,
    aten.expm1_.default: functions.expm1,
    aten.clamp_.default: clamp,
}
"""Operations whose result is written into their first operand."""

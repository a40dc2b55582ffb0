"""Rules on pairs for torch's operations that compute, added to the `TABLE` that `Doubled` looks into."""

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from rankscope.doubled import functions, reductions
from rankscope.doubled.entries import (
    TABLE,
    Number,
    Rule,
    aten,
    choose,
    copied,
    fill,
    masked_fill,
    paired,
    rule,
    together,
)
from rankscope.doubled.matmul import product
from rankscope.doubled.pairs import (
    Pair,
    add,
    divide,
    multiply,
    negative,
    no_type_check,
    scaled,
    sqrt,
    subtract,
)


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
        raise NotImplementedError(
            f"doubled precision has whole powers up to 64 and the root; got the power {exponent}"
        )
    if exponent == 0:
        return paired(torch.ones_like(x.hi))
    raised = reduce(multiply, [x] * abs(int(exponent)))
    return raised if exponent > 0 else reciprocal(raised)


@rule(aten.mm.default, aten.bmm.default)
def matrix_product(A: Any, B: Any) -> Pair:
    """The product A B of matrices, or of batches of them."""
    return product(*together(A, B))


# Functions of entries and along axes.

TABLE |= {
    aten.rsub.Scalar: lambda a, b, alpha=1: minus(b, a, alpha=alpha),
    aten.rsub.Tensor: lambda a, b, *, alpha=1: minus(b, a, alpha=alpha),
    aten.mv.default: lambda A, v: matrix_product(A, paired(v).mapped(lambda t: t[:, None])).mapped(
        torch.ravel
    ),
    aten.dot.default: lambda u, v: reductions.total(times(u, v)),
    **dict.fromkeys(
        (aten.addmm.default, aten.baddbmm.default),
        lambda x, A, B, *, beta=1, alpha=1: plus(
            x if beta == 1 else times(x, beta), matrix_product(A, B), alpha=alpha
        ),
    ),
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
    aten.linalg_vector_norm.default: lambda x, order=2, dim=None, keepdim=False, dtype=None: reductions.norm(
        x, order, dim, keepdim
    ),
    aten.logsumexp.default: reductions.logsumexp,
    aten._log_softmax.default: lambda x, dim, half: reductions.log_softmax(x, dim),
    aten._softmax.default: lambda x, dim, half: reductions.softmax(x, dim),
    aten.nan_to_num.default: lambda x, *args, **values: Pair(x.hi.nan_to_num(*args, **values), x.lo),
    aten._local_scalar_dense.default: lambda x: x.hi.item(),
    **{
        operation: lambda x, *args, of=operation, **kwargs: of(x.hi, *args, **kwargs)
        for operation in (
            aten.isnan.default, aten.isfinite.default, aten.isinf.default, aten.any.default, aten.any.dim,
            aten.all.default, aten.all.dim, aten.sign.default,
        )
    },
}  # fmt: skip


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
    aten.clamp_.default: clamp,
}
"""Operations whose result is written into their first operand."""

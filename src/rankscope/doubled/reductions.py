"""Sums and largest entries of pairs along axes."""

import math

import torch
from torch import Tensor

from rankscope.doubled import functions
from rankscope.doubled.pairs import Pair, add, divide, multiply, negative, sqrt, subtract

Axes = int | list[int] | tuple[int, ...] | None


def _axes(x: Pair, dim: Axes) -> list[int]:
    """The axes of a reduction, from the last to the first; all axes if none is named."""
    named = [dim] if isinstance(dim, int) else list(dim or range(x.hi.ndim))
    return sorted({axis % max(1, x.hi.ndim) for axis in named} if x.hi.ndim else (), reverse=True)


def _without(x: Pair, axes: list[int], keepdim: bool) -> Pair:
    """The pair with its reduced axes, of size one, taken out unless `keepdim`."""
    for axis in () if keepdim else axes:
        x = x.mapped(lambda t, a=axis: t.squeeze(a))
    return x


def total(x: Pair, dim: Axes = None, keepdim: bool = False) -> Pair:
    """The sum, by halves: errors grow with the log of the number of terms."""
    axes = _axes(x, dim)
    for axis in axes:
        n = x.hi.shape[axis]
        if not n:
            x = x.mapped(lambda t, a=axis: t.sum(a, keepdim=True))
        while (n := x.hi.shape[axis]) > 1:
            half = n // 2
            ends = [x.mapped(lambda t, a=axis, s=start, h=half: t.narrow(a, s, h)) for start in (0, n - half)]
            folded = add(*ends)
            if n % 2:
                middle = x.mapped(lambda t, a=axis, h=half: t.narrow(a, h, 1))
                folded = Pair(torch.cat([folded.hi, middle.hi], axis), torch.cat([folded.low, middle.low], axis))
            x = folded
    return _without(x, axes, keepdim)


def mean(x: Pair, dim: Axes = None, keepdim: bool = False) -> Pair:
    """The sum over the number of terms."""
    axes = _axes(x, dim)
    count = math.prod(x.hi.shape[axis] for axis in axes)
    return divide(total(x, axes, keepdim), Pair(x.hi.new_tensor(float(count))))


def largest(x: Pair, dim: Axes = None, keepdim: bool = False) -> Pair:
    """The largest entry: by hi, then by lo."""
    axes = _axes(x, dim)
    hi = x.hi.amax(axes, keepdim=True) if axes else x.hi
    if x.lo is None or not axes:
        return _without(Pair(hi, x.lo), axes, keepdim)
    lo = x.lo.masked_fill(x.hi != hi, -torch.inf).amax(axes, keepdim=True)
    return _without(Pair(hi, lo.masked_fill(lo == -torch.inf, 0.0)), axes, keepdim)  # nan is no entry's equal


def smallest(x: Pair, dim: Axes = None, keepdim: bool = False) -> Pair:
    """The smallest entry along the axes."""
    return negative(largest(negative(x), dim, keepdim))


def index_of_largest(x: Pair, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The index of the largest entry along an axis, the first of equals."""
    if dim is None:
        return index_of_largest(x.mapped(torch.flatten), 0)
    top = largest(x, dim, True)
    equal = (x.hi == top.hi) & (x.low == top.low) | x.hi.isnan()
    return equal.to(torch.int8).argmax(dim, keepdim=keepdim)


def norm(x: Pair, order: int | float = 2, dim: Axes = None, keepdim: bool = False) -> Pair:
    """The 1-, 2- or largest-entry norm."""
    sizes = absolute(x)
    if order == 1:
        return total(sizes, dim, keepdim)
    if order == 2:
        return sqrt(total(multiply(x, x), dim, keepdim))
    if order == torch.inf:
        return largest(sizes, dim, keepdim)
    raise NotImplementedError(f"a norm of doubled precision must be of order 1, 2 or inf; got {order}")


def absolute(x: Pair) -> Pair:
    """The absolute value |x| of a pair."""
    return x.mapped(lambda t: torch.where(x.hi < 0, -t, t))


def logsumexp(x: Pair, dim: Axes, keepdim: bool = False) -> Pair:
    """`log sum e^x`, the largest taken out first."""
    axes = _axes(x, dim)
    top = largest(x, axes, True)
    top = top.mapped(lambda t: t.masked_fill(~top.hi.isfinite(), 0.0))
    logs = add(functions.log(total(functions.exp(subtract(x, top)), axes, True)), top)
    return _without(logs, axes, keepdim)


def log_softmax(x: Pair, dim: int) -> Pair:
    """The log-softmax `x - log sum e^x` along an axis."""
    shifted = subtract(x, largest(x, dim, True))
    return subtract(shifted, functions.log(total(functions.exp(shifted), dim, True)))


def softmax(x: Pair, dim: int) -> Pair:
    """The softmax `e^x / sum e^x` along an axis."""
    grown = functions.exp(subtract(x, largest(x, dim, True)))
    return divide(grown, total(grown, dim, True))

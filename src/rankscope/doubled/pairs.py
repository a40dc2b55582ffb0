"""Numbers as the sum of two float64, `hi + lo` with hi the nearest float64: about 32 digits.

Error-free transforms (Knuth, Dekker, Veltkamp) give the rounding error of a float64 sum or product as another
float64, and with it sums, products, quotients and roots of pairs come out to a relative 2^-103 or better
(Joldes, Muller and Popescu 2017). `Pair(hi, None)` is a float64 taken as it is: its lo is zero.
"""

import math
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import product, zip_longest
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

BLOCK = 1 << 14  # Entries that a kernel takes at a time on the CPU: what it makes on its way then stays in the cache
LOW_BITS = 1 << 27


Function = TypeVar("Function", bound=Callable[..., Any])


def no_type_check(kernel: Function) -> Function:
    """Marks a function that runs ten thousand times a layer: the run-time type checker of the tests, which
    looks for this name, leaves its annotations unchecked."""
    return kernel


class Pair(NamedTuple):
    """Numbers `hi + lo`, hi the float64 nearest to the sum; lo None means zero."""

    hi: Tensor
    lo: Tensor | None = None

    @property
    @no_type_check
    def low(self) -> Tensor:
        """lo as a tensor, a zero that takes no memory where there is none."""
        return self.hi.new_zeros(()).expand(self.hi.shape) if self.lo is None else self.lo

    @no_type_check
    def mapped(self, move: Callable[[Tensor], Tensor]) -> "Pair":
        """Both parts moved alike: entries chosen, repeated, or scaled by powers of two."""
        return Pair(move(self.hi), None if self.lo is None else move(self.lo))


@no_type_check
def where(pick: Tensor, a: Pair, b: Pair) -> Pair:
    """Entries of a where `pick` is true, else of b."""
    return Pair(torch.where(pick, a.hi, b.hi), torch.where(pick, a.low, b.low))


@no_type_check
def two_sum(a: Tensor, b: Tensor) -> Pair:
    """a + b exactly, whichever is larger."""
    s = a + b
    t = s - a
    return Pair(s, (a - (s - t)).add_(b - t))


@no_type_check
def quick_two_sum(a: Tensor, b: Tensor) -> Pair:
    """a + b exactly, where |a| >= |b| or a is 0."""
    s = a + b
    return Pair(s, b - (s - a))


@no_type_check
def halves(a: Tensor) -> tuple[Tensor, Tensor]:
    """a as the sum of two numbers of 26 bits each: products of such are exact. The low 27 bits are rounded
    off as an integer, which unlike Veltkamp's product cannot overflow."""
    high = ((a.view(torch.int64) + LOW_BITS // 2) & -LOW_BITS).view(torch.float64)
    return high, a - high


@no_type_check
def two_prod(a: Tensor, b: Tensor, halves_of_b: tuple[Tensor, Tensor] | None = None) -> Pair:
    """a * b exactly (unless its last bits are below 1e-308): four exact products, so that fusing does not matter."""
    p = a * b
    ah, al = halves(a)
    bh, bl = halves_of_b or halves(b)
    e = torch.addcmul(p.neg(), ah, bh)
    return Pair(p, e.addcmul_(ah, bl).addcmul_(al, bh).addcmul_(al, bl))


@no_type_check
def plus(a: Pair, b: Pair) -> Pair:
    """The sum a + b of pairs."""
    s, e = two_sum(a.hi, b.hi)
    assert e is not None
    if a.lo is None or b.lo is None:
        rest = a.lo if b.lo is None else b.lo
        return quick_two_sum(s, e if rest is None else e.add_(rest))
    t, f = two_sum(a.lo, b.lo)
    s, e = quick_two_sum(s, e.add_(t))
    assert e is not None and f is not None
    return quick_two_sum(s, e.add_(f))


@no_type_check
def larger_plus(a: Pair, b: Pair) -> Pair:
    """a + b where |a| is twice |b| or more, or zero: few digits cancel."""
    s, e = quick_two_sum(a.hi, b.hi)
    assert e is not None
    for lo in (a.lo, b.lo):
        e = e if lo is None else e + lo
    return quick_two_sum(s, e)


@no_type_check
def minus(a: Pair, b: Pair) -> Pair:
    """The difference a - b of pairs."""
    return plus(a, negative(b))


@no_type_check
def negative(a: Pair) -> Pair:
    """The pair -a, without rounding."""
    return a.mapped(torch.neg)


@no_type_check
def times(a: Pair, b: Pair, halves_of_b: tuple[Tensor, Tensor] | None = None) -> Pair:
    """a * b; halves of b's hi that are known need not be taken again."""
    p, e = two_prod(a.hi, b.hi, halves_of_b)
    assert e is not None
    if a.lo is not None:
        e.addcmul_(a.lo, b.hi)
    if b.lo is not None:
        e.addcmul_(a.hi, b.lo)
    return quick_two_sum(p, e)


def over(a: Pair, b: Pair) -> Pair:
    """a / b: what the float64 quotient leaves, divided once more."""
    q = a.hi / b.hi
    p, e = two_prod(q, b.hi)
    assert e is not None
    left = (a.hi - p).sub_(e)
    left = left if a.lo is None else left.add_(a.lo)
    left = left if b.lo is None else left.addcmul_(q, b.lo, value=-1)
    return quick_two_sum(q, left.div_(b.hi))


def root(a: Pair) -> Pair:
    """sqrt(a): what the float64 root leaves, by one step of Newton."""
    y = a.hi.sqrt()
    p, e = two_prod(y, y)
    assert e is not None
    left = (a.hi - p).sub_(e)
    left = left if a.lo is None else left.add_(a.lo)
    return quick_two_sum(y, left.div_((2 * y).masked_fill_(y == 0, 1.0)))


@no_type_check
def power_of_two(k: Tensor) -> Tensor:
    """2^k of integers from -1022 to 1023, exactly: the bits of its exponent."""
    return ((k + 1023) << 52).view(torch.float64)


@no_type_check
def scaled(a: Pair, k: Tensor) -> Pair:
    """`2^k a`, for any integers k."""
    k = k.clamp(-2044, 2044)
    half = k >> 1
    first, second = power_of_two(half), power_of_two(k - half)
    return a.mapped(lambda part: part * first * second)


Kernel = Callable[..., Pair]


def elementwise(plain: Callable[..., Tensor]) -> Callable[[Kernel], Kernel]:
    """Decorator that runs a kernel entry by entry, in blocks that fit the cache. Where it gives no finite
    number, `plain`, the same function in float64, decides between infinities and nan, which have no lo."""

    def of(kernel: Kernel) -> Kernel:
        @wraps(kernel)
        @no_type_check
        def whole(*operands: Pair) -> Pair:
            shape = _common([a.hi.shape for a in operands])
            if math.prod(shape) <= BLOCK or operands[0].hi.device.type != "cpu":
                return _finite(kernel(*operands), operands, plain)
            hi, lo = operands[0].hi.new_empty(shape), operands[0].hi.new_empty(shape)
            for index in _blocks(shape):
                some = tuple(a.mapped(lambda t, i=index: _cut(t, i)) for a in operands)
                part = _finite(kernel(*some), some, plain)
                hi[index], lo[index] = part.hi, part.low
            return Pair(hi, lo)

        return whole

    return of


def _common(shapes: list[torch.Size]) -> tuple[int, ...]:
    """The shape that all are broadcast to (torch's own function for it loads sympy)."""
    axes = zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in axes)[::-1]


@no_type_check
def _finite(result: Pair, operands: tuple[Pair, ...], plain: Callable[..., Tensor]) -> Pair:
    """The result, with what `plain` gives in float64 where it is not finite."""
    hi, lo = result.hi, result.low
    if math.isfinite(lo.sum()):  # one pass; an infinite hi leaves nan in lo
        return Pair(hi, lo)
    bad = ~lo.isfinite()
    return Pair(torch.where(bad, plain(*(a.hi for a in operands)), hi), lo.masked_fill(bad, 0.0))


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Indices of blocks that cover a tensor, of at most BLOCK entries each."""
    inner, axis = 1, len(shape) - 1
    while axis > 0 and inner * shape[axis] <= BLOCK:
        inner, axis = inner * shape[axis], axis - 1
    step = max(1, BLOCK // inner)
    outer = [[slice(i, i + 1) for i in range(size)] for size in shape[:axis]]
    runs = [slice(i, i + step) for i in range(0, shape[axis], step)]
    yield from product(*outer, runs, *[[slice(None)]] * (len(shape) - 1 - axis))


def _cut(t: Tensor, index: tuple[slice, ...]) -> Tensor:
    """The block `index` of the broadcast result, taken from an operand before it is broadcast."""
    axes = index[len(index) - t.ndim :]
    return t[tuple(axis if size > 1 else slice(None) for axis, size in zip(axes, t.shape, strict=True))]


add = elementwise(torch.add)(plus)
subtract = elementwise(torch.sub)(minus)
multiply = elementwise(torch.mul)(times)
divide = elementwise(torch.div)(over)
sqrt = elementwise(torch.sqrt)(root)

"""Elementary functions of pairs, each to a relative 1e-30 wherever float64's range lets it.

Arguments are brought near a point of a table and a short series does the rest: its large terms in pairs, and
those that weigh less than 2^-53 of the sum in float64 alone. Constants and tables that float64 does not hold
are sums of float64, computed with Python's decimals.
"""

import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from functools import cache

import torch
from torch import Tensor

from rankscope.doubled import pairs
from rankscope.doubled.pairs import Pair, elementwise, larger_plus, minus, over, plus, scaled, times, two_sum, where

DIGITS = 60


def _pi() -> Decimal:
    """Pi by the arithmetic-geometric mean (Gauss, Legendre), to the digits of the context."""
    a, b, t, weight = Decimal(1), Decimal("0.5").sqrt(), Decimal("0.25"), Decimal(1)
    for _ in range(10):  # each round doubles the digits
        a, b, before = (a + b) / 2, (a * b).sqrt(), a
        t, weight = t - weight * (before - a) ** 2, 2 * weight
    return (a + b) ** 2 / (4 * t)


NAMED: dict[str, Callable[[], Decimal]] = {
    "ln 2": lambda: Decimal(2).ln(),
    "sqrt(1/2)": lambda: Decimal("0.5").sqrt(),
    "sqrt(2/pi)": lambda: (2 / _pi()).sqrt(),
    "1/sqrt(2 pi)": lambda: 1 / (2 * _pi()).sqrt(),
    **{f"1/{n}!": lambda n=n: 1 / Decimal(math.factorial(n)) for n in range(1, 6)},
}


@cache
def parts(name: str, count: int = 2) -> tuple[float, ...]:
    """A constant of `NAMED`, or a number written in decimals, as a sum of `count` float64."""
    with localcontext(prec=DIGITS):
        return in_parts(NAMED[name]() if name in NAMED else Decimal(name), count)


def in_parts(value: Decimal, count: int = 2) -> tuple[float, ...]:
    """The float64 nearest to the value, then the one nearest to what is left, and so on."""
    summands = []
    for _ in range(count):
        summands.append(float(value))
        value -= Decimal(summands[-1])
    return tuple(summands)


@cache
def scaled_erfc_series(steps: int, last: int, order: int) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """Taylor coefficients 0 .. order of `y(x) = e^(x^2) erfc(x)` at x = 0, 1/steps, ..., last, in two parts.

    From `y' = 2 x y - 2 / sqrt(pi)`. The last y follows from the asymptotic series; errors of y shrink on the
    way down. Those of high coefficients grow, at x = 28 by 10^43: hence the digits."""
    with localcontext(prec=150):
        c, h = 2 / _pi().sqrt(), Decimal(1) / steps
        term = y = c / (2 * last)
        for n in range(1, 150):
            term *= -Decimal(2 * n - 1) / (2 * last * last)
            y += term
        table = []
        for i in range(last * steps, -1, -1):
            x = i * h
            a = [y, 2 * x * y - c]
            for k in range(1, 60):
                a.append((2 * x * a[k] + 2 * a[k - 1]) / (k + 1))
            table.append(tuple(in_parts(coefficient) for coefficient in a[: order + 1]))
            y = sum((coefficient * (-h) ** k for k, coefficient in enumerate(a)), Decimal(0))
        return tuple(reversed(table))


STEEP = 800.0  # e^-800 is zero and e^800 infinite in float64
FINE = 256  # points of the table of exponentials in a unit
LAST, STEPS, ORDER, IN_PAIRS = 28, 16, 19, 10
"""Of erfc's table: its end, where erfc is 0 in float64, points in a unit, order of the series, and how many
of its coefficients need two parts."""


def named(name: str, like: Tensor) -> Pair:
    """A constant of `NAMED` as a pair on the device of a tensor."""
    hi, lo = parts(name)
    return Pair(like.new_tensor(hi), like.new_tensor(lo))


def _point(value: float, like: Tensor) -> Pair:
    """A float64 number as a pair on the device of a tensor."""
    return Pair(like.new_tensor(value))


@cache
def _ln2_parts() -> tuple[float, float, float]:
    """ln 2 as a sum whose first two have 42 bits: an exponent times these is exact."""
    ln2 = parts("ln 2", 4)
    first = math.floor(ln2[0] * 2.0**42) / 2.0**42
    rest = math.fsum([ln2[0] - first, *ln2[1:]])
    second = math.floor(rest * 2.0**84) / 2.0**84
    return first, second, math.fsum([ln2[0] - first, *ln2[1:], -second])


@cache
def _exponentials(device: torch.device) -> tuple[Pair, Pair]:
    """(e^(j/FINE), e^(j/FINE) - 1) for j = -FINE .. FINE."""
    with localcontext(prec=DIGITS):
        powers = [(Decimal(j) / FINE).exp() for j in range(-FINE, FINE + 1)]
        tables = [in_parts(power) for power in powers], [in_parts(power - 1) for power in powers]
    at, less = (torch.tensor(table, dtype=torch.float64, device=device).T.contiguous() for table in tables)
    return Pair(*at), Pair(*less)


@cache
def _erfc_table(device: torch.device) -> Tensor:
    """Taylor coefficients of `e^(x^2) erfc(x)`, `[hi or lo, coefficient, point]`."""
    table = torch.tensor(scaled_erfc_series(STEPS, LAST, ORDER), dtype=torch.float64, device=device)
    return table.permute(2, 1, 0).contiguous()


def _near(h: Tensor) -> Tensor:
    """An argument within the reach of tables; nan as 0, to be put back."""
    return h.clamp(-STEEP, STEEP).nan_to_num(nan=0.0)


def _reduced(x: Pair) -> tuple[Tensor, Pair]:
    """(k, e^r - 1) with x = k ln 2 + r, |r| <= ln 2 / 2; the second to full relative precision."""
    h = _near(x.hi)
    k = (h / parts("ln 2")[0]).round()
    first, second, third = _ln2_parts()
    r = two_sum(h - k * first, k * -second)  # the first difference is exact
    if x.lo is not None:
        r = plus(r, Pair(x.lo.clamp(-1e-9, 1e-9)))  # larger only where hi was cut off
    r = plus(r, Pair(k * -third))
    j = (r.hi * FINE).round()
    s = plus(r, Pair(j / -FINE))
    tail = torch.zeros_like(h)
    for n in range(11, 5, -1):
        tail = tail.mul_(s.hi).add_(1 / math.factorial(n))
    w, split = Pair(tail * s.hi), pairs.halves(s.hi)
    for n in range(5, 0, -1):
        w = times(larger_plus(named(f"1/{n}!", h), w), s, split)
    at, less = _exponentials(h.device)
    index = (j + FINE).long()
    return k, larger_plus(less.mapped(lambda t: t.take(index)), times(w, at.mapped(lambda t: t.take(index))))


def _marked(result: Pair, x: Tensor) -> Pair:
    """nan in lo where x is nan or the result not finite: there float64's own function answers."""
    x = x.clamp(-STEEP, STEEP)
    return Pair(result.hi, result.low + (x - x) + (result.hi - result.hi))


def _exp(x: Pair) -> Pair:
    k, m = _reduced(x)
    return scaled(larger_plus(_point(1.0, m.hi), m), k.long())


@elementwise(torch.exp)
def exp(x: Pair) -> Pair:
    """The exponential e^x of a pair."""
    return _marked(_exp(x), x.hi)


def _expm1(x: Pair) -> Pair:
    k, m = _reduced(x)
    unit = _point(1.0, m.hi)
    return where(k == 0, m, minus(scaled(larger_plus(unit, m), k.long()), unit))


@elementwise(torch.expm1)
def expm1(x: Pair) -> Pair:
    """e^x - 1, also relative to itself near zero."""
    return _marked(_expm1(x), x.hi)


def _log1p_near(w: Pair) -> Pair:
    """log(1 + w) for w from -0.5 to 1: float64's, then one step of Halley on e^y - 1 = w."""
    y = w.hi.log1p()
    k, m = _reduced(Pair(y))
    m = plus(scaled(m, k.long()), Pair(pairs.power_of_two(k.long()) - 1))  # |k| <= 1: e^y - 1
    return pairs.quick_two_sum(y, 2 * minus(w, m).hi / (2 + w.hi + m.hi))


def _log(x: Pair) -> Pair:
    """log x as e ln 2 + log(f), x = 2^e f with f between sqrt(1/2) and sqrt(2)."""
    mantissa, e = torch.frexp(x.hi.masked_fill(~x.hi.isfinite(), 1.0))
    low = mantissa < math.sqrt(0.5)
    e = e.long() - low.long()
    f = scaled(x, -e)
    s = f.hi - 1  # exact
    w = Pair(s) if f.lo is None else two_sum(s, f.lo)
    return plus(times(named("ln 2", s), Pair(e.double())), _log1p_near(w))


@elementwise(torch.log)
def log(x: Pair) -> Pair:
    """log x, also relative to itself near one."""
    return _marked(_log(x), x.hi.log())


@elementwise(torch.log1p)
def log1p(x: Pair) -> Pair:
    """log(1 + x), also relative to itself near zero."""
    near = x.hi.abs() < 0.4
    inside = x.mapped(lambda t: t.masked_fill(~near, 0.0))
    close, far = _log1p_near(inside), _log(plus(_point(1.0, x.hi), x))
    return _marked(where(near, close, far), x.hi.log1p())


def _below_zero(x: Pair) -> Pair:
    """-|x|, whose exponential cannot overflow."""
    return x.mapped(lambda t: torch.where(x.hi > 0, -t, t))


@elementwise(torch.sigmoid)
def sigmoid(x: Pair) -> Pair:
    """1 / (1 + e^-x), small on the left to full relative precision."""
    e = _exp(_below_zero(x))
    above = Pair(torch.where(x.hi > 0, 1.0, e.hi), e.low.masked_fill(x.hi > 0, 0.0))
    return _marked(over(above, plus(_point(1.0, e.hi), e)), x.hi)


@elementwise(torch.tanh)
def tanh(x: Pair) -> Pair:
    """`-m / (2 + m)` with m = e^(-2|x|) - 1, and the sign of x."""
    m = _expm1(_below_zero(x).mapped(lambda t: 2 * t))
    t = over(m, plus(_point(2.0, m.hi), m))
    return _marked(t.mapped(lambda part: torch.where(x.hi > 0, -part, part)), x.hi)


@elementwise(torch.special.erfc)
def erfc(x: Pair) -> Pair:
    """The complementary error function, in its upper tail `e^(-x^2) y(x)` with y from a table of Taylor series."""
    a = pairs.negative(_below_zero(x))
    a = Pair(_near(a.hi).clamp(max=LAST), None if a.lo is None else a.lo.masked_fill(a.hi > LAST, 0.0))
    i = (a.hi * STEPS).round()
    t = plus(a, Pair(i / -STEPS))
    table, index = _erfc_table(a.hi.device), i.long()
    high = torch.zeros_like(a.hi)
    for n in range(ORDER, IN_PAIRS - 1, -1):
        high = high.mul_(t.hi).add_(table[0, n].take(index))
    y, split = Pair(high), pairs.halves(t.hi)
    for n in range(IN_PAIRS - 1, -1, -1):
        y = larger_plus(Pair(table[0, n].take(index), table[1, n].take(index)), times(y, t, split))
    tail = times(y, _gauss(a))
    return _marked(where(x.hi < 0, minus(_point(2.0, a.hi), tail), tail), x.hi)


def _gauss(x: Pair) -> Pair:
    """e^(-x^2), the square in three parts: an error of it is a relative one of the result."""
    square, e = pairs.two_prod(x.hi, x.hi)
    assert e is not None
    if x.lo is not None:
        u, v = pairs.two_prod(2 * x.hi, x.lo)
        e, w = two_sum(e, u)
        assert v is not None and w is not None
        last = v + w + x.lo * x.lo
    else:
        last = torch.zeros_like(square)
    result = _exp(Pair(-square, -e))
    return Pair(result.hi, result.low.addcmul(result.hi, last, value=-1))

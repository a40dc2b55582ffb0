"""Constants and tables that float64 does not hold, as sums of float64: computed with Python's decimals."""

from collections.abc import Callable
from decimal import Decimal, localcontext
from functools import cache

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
def exponentials(steps: int) -> tuple[tuple[tuple[float, ...], ...], tuple[tuple[float, ...], ...]]:
    """(e^(j/steps), e^(j/steps) - 1) for j = -steps .. steps, in two parts each."""
    with localcontext(prec=DIGITS):
        values = [(Decimal(j) / steps).exp() for j in range(-steps, steps + 1)]
        return tuple(map(in_parts, values)), tuple(in_parts(value - 1) for value in values)


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

"""Error-free transforms make no error, and arithmetic on pairs almost none."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankscope.doubled import two_sum
from rankscope.doubled.pairs import BLOCK, Pair, add, divide, halves, multiply, sqrt, subtract, two_prod
from tests.doubled.numbers import drawn, exactly

Within = st.floats(min_value=-1e140, max_value=1e140).filter(lambda x: x == 0 or abs(x) > 1e-130)
"""Products of two, and the errors of these, are within float64's range."""


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@given(Within, Within)
def test_sums_and_products_are_exact(a: float, b: float) -> None:
    for pair, true in (
        (two_sum(tensor(a), tensor(b)), Fraction(a) + Fraction(b)),
        (two_prod(tensor(a), tensor(b)), Fraction(a) * Fraction(b)),
    ):
        assert Fraction(float(pair.hi)) + Fraction(float(pair.low)) == true
        assert float(pair.hi) == float(true)


@given(Within)
def test_halves_have_26_bits_each(a: float) -> None:
    high, low = (Fraction(float(half)) for half in halves(tensor(a)))
    assert high + low == Fraction(a)
    for half in (high, low):
        mantissa = abs(half.numerator)
        assert mantissa == 0 or (mantissa // (mantissa & -mantissa)).bit_length() <= 26


OPERATIONS: list[tuple[Callable[..., Pair], Callable[[Fraction, Fraction], Fraction]]] = [
    (add, lambda a, b: a + b),
    (subtract, lambda a, b: a - b),
    (multiply, lambda a, b: a * b),
    (divide, lambda a, b: a / b),
]


@pytest.mark.parametrize(("operation", "true"), OPERATIONS)
@pytest.mark.parametrize("scale", [1e-80, 1e-3, 1.0, 1e80])
def test_arithmetic(operation: Any, true: Any, scale: float) -> None:
    a, b = drawn(300, seed=1), drawn(300, seed=3, scale=scale)
    found = operation(a.pair, b.pair)
    for got, x, y in zip(exactly(type(a)(found)), exactly(a), exactly(b), strict=True):
        assert abs(got - true(x, y)) <= Fraction(2) ** -102 * abs(true(x, y))
    assert torch.equal(found.hi, found.hi + found.low)  # hi is the nearest float64


def test_sums_that_cancel_keep_their_digits() -> None:
    """1 - 1/3 - 2/3 of pairs is off by their own rounding only."""
    a = drawn(200, seed=5)
    near = add(a.pair, Pair(a.hi * 2.0**-60))
    left = subtract(near, a.pair)
    for got, x in zip(exactly(type(a)(left)), exactly(a), strict=True):
        assert abs(got - Fraction(float(x)) * Fraction(2) ** -60) <= abs(x) * Fraction(2) ** -105


def test_the_root() -> None:
    a = drawn(300, seed=7).abs()
    for got, x in zip(exactly(type(a)(sqrt(a.pair))), exactly(a), strict=True):
        assert abs(got * got - x) <= Fraction(2) ** -101 * x


def test_large_tensors_go_by_blocks_and_are_broadcast() -> None:
    """Entries of the whole are those of its rows, whatever the shapes."""
    a, b = drawn(3, 5, BLOCK // 4, seed=1), drawn(5, 1, seed=2)
    whole = multiply(a.pair, b.pair)
    for i in range(3):
        for j in range(5):
            part = multiply(Pair(a.hi[i, j], a.lo[i, j]), Pair(b.hi[j], b.lo[j]))
            assert torch.equal(whole.hi[i, j], part.hi) and torch.equal(whole.low[i, j], part.low)


@pytest.mark.parametrize(
    ("operation", "plain"), [(add, torch.add), (subtract, torch.sub), (multiply, torch.mul), (divide, torch.div)]
)
def test_infinities_and_nan_are_those_of_float64(operation: Any, plain: Any) -> None:
    values = tensor(0.0, 1.0, -2.0, math.inf, -math.inf, math.nan, 1e308)
    a, b = values[:, None], values[None]
    found = operation(Pair(a), Pair(b))
    assert torch.equal(found.hi.nan_to_num(nan=7.0), plain(a, b).nan_to_num(nan=7.0))
    assert bool(found.low.isfinite().all())

"""Elementary functions against mpmath: to 1e-30 of themselves, at random points, near zero and in tails."""

import math
from collections.abc import Callable
from typing import Any

import mpmath as mp
import pytest
import torch
from torch import Tensor

from rankscope.doubled import Doubled, constant, nearest
from tests.doubled.numbers import drawn, numbers, off

FUNCTIONS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Any]]] = {
    "exp": (torch.exp, mp.exp),
    "expm1": (torch.expm1, mp.expm1),
    "log": (lambda x: x.abs().log(), lambda x: mp.log(abs(x))),
    "log1p": (lambda x: x.abs().log1p(), lambda x: mp.log1p(abs(x))),
    "log1p below zero": (lambda x: (x.abs() / (1 + x.abs())).neg().log1p(), lambda x: -mp.log1p(abs(x))),
    "sigmoid": (torch.sigmoid, lambda x: 1 / (1 + mp.exp(-x))),
    "tanh": (torch.tanh, mp.tanh),
    "erfc": (torch.special.erfc, mp.erfc),
    "silu": (torch.nn.functional.silu, lambda x: x / (1 + mp.exp(-x))),
    "sqrt": (lambda x: x.abs().sqrt(), lambda x: mp.sqrt(abs(x))),
    "reciprocal": (torch.reciprocal, lambda x: 1 / x),
    "cube": (lambda x: x**3, lambda x: x**3),
}


@pytest.mark.parametrize("scale", [1e-20, 1e-5, 0.1, 1.0, 7.0])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_to_thirty_digits(name: str, scale: float) -> None:
    mine, true = FUNCTIONS[name]
    x = drawn(80, seed=3, scale=scale)
    with mp.workdps(60):
        assert off(mine(x), [true(each) for each in numbers(x)]) < 1e-30


def test_near_one_the_log_is_relative_to_itself() -> None:
    x = 1 + drawn(80, seed=5, scale=1e-9)
    with mp.workdps(60):
        assert off(x.log(), [mp.log(each) for each in numbers(x)]) < 1e-30


@pytest.mark.parametrize(
    ("mine", "true", "furthest"),
    [
        (torch.special.erfc, mp.erfc, 25.5),
        (lambda x: torch.sigmoid(-x), lambda x: 1 / (1 + mp.exp(x)), 640.0),
        (lambda x: torch.exp(-x), lambda x: mp.exp(-x), 640.0),
        (lambda x: (-x).expm1() + 1, lambda x: mp.exp(-x), 2.0),
        (torch.exp, mp.exp, 709.0),
    ],
)
def test_tails(mine: Any, true: Any, furthest: float) -> None:
    """As far as a low part is above 1e-308."""
    x = drawn(150, seed=7).abs()
    x = x * (furthest / x.amax())
    with mp.workdps(400):
        assert off(mine(x), [true(each) for each in numbers(x)]) < 1e-30


@pytest.mark.parametrize(
    "function",
    [torch.exp, torch.expm1, torch.log, torch.log1p, torch.sigmoid, torch.tanh, torch.special.erfc, torch.sqrt],
)
def test_ends_of_the_range_are_those_of_float64(function: Any) -> None:
    x = torch.tensor(
        [0.0, -0.0, math.inf, -math.inf, math.nan, 1e308, -1e308, 1e-310, 700.0, -700.0, 1e3, -1e3, 30.0],
        dtype=torch.float64,
    )
    found, plain = function(Doubled.of(x)), function(x)
    assert torch.allclose(found.hi, plain, rtol=1e-15, atol=1e-305, equal_nan=True)
    assert bool(found.lo.isfinite().all())


def test_an_exponent_far_beyond_the_range_has_a_low_part() -> None:
    x = Doubled.of(torch.tensor([-1e300, 1e300], dtype=torch.float64)) / 3
    assert nearest(x.exp()).tolist() == [0.0, math.inf]


@pytest.mark.parametrize("order", [1, 2, torch.inf])
def test_norms(order: float) -> None:
    x = drawn(6, 37, seed=9)
    with mp.workdps(60):
        rows = [list(numbers(row)) for row in x]
        true = [mp.norm(row, mp.inf if order == torch.inf else order) for row in rows]
        assert off(torch.linalg.vector_norm(x, ord=order, dim=-1), true) < 1e-30


def test_sums_softmax_and_its_logs() -> None:
    x = drawn(5, 23, seed=11, scale=9.0)
    with mp.workdps(60):
        rows = [list(numbers(row)) for row in x]
        sums = [mp.fsum(row) for row in rows]
        wholes = [mp.log(mp.fsum(map(mp.exp, row))) for row in rows]
        each = [u - whole for row, whole in zip(rows, wholes, strict=True) for u in row]
        assert off(x.sum(-1), sums) < 1e-30 and off(x.mean(-1), [total / 23 for total in sums]) < 1e-30
        assert off(x.logsumexp(-1), wholes) < 1e-30
        assert off(x.softmax(-1), list(map(mp.exp, each))) < 1e-29
        absolute = max(abs(a - b) for a, b in zip(numbers(x.log_softmax(-1)), each, strict=True))
        assert absolute < 1e-29


@pytest.mark.parametrize(
    ("name", "true"),
    [
        ("sqrt(1/2)", lambda: mp.sqrt(0.5)),
        ("sqrt(2/pi)", lambda: mp.sqrt(2 / mp.pi)),
        ("1/sqrt(2 pi)", lambda: 1 / mp.sqrt(2 * mp.pi)),
        ("0.044715", lambda: mp.mpf("0.044715")),
    ],
)
def test_constants(name: str, true: Any) -> None:
    with mp.workdps(60):
        assert off(constant(name, drawn(1)), [true()]) < 1e-32
        assert constant(name, torch.zeros(1)) == float(true())

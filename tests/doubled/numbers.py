"""Pairs drawn at random, and pairs as numbers of any precision."""

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import mpmath as mp
import torch
from torch import Tensor

from rankscope.doubled import Doubled, two_sum
from tests.builders import normal


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Any:
    """Normal numbers of 32 digits, `Doubled` (which mypy does not follow through torch's operations)."""
    hi = scale * normal(*shape, seed=seed)
    return Doubled(two_sum(hi, hi * normal(*shape, seed=seed + 1) * 2.0**-55))


def exactly(x: Tensor) -> list[Fraction]:
    """Every entry as a fraction."""
    hi, lo = (x.hi, x.lo) if isinstance(x, Doubled) else (x, torch.zeros_like(x))
    return [Fraction(a) + Fraction(b) for a, b in zip(hi.flatten().tolist(), lo.flatten().tolist(), strict=True)]


def numbers(x: Tensor) -> Iterator[mp.mpf]:
    """Every entry as an mpmath number."""
    for value in exactly(x):
        yield mp.mpf(value.numerator) / value.denominator


def off(x: Tensor, true: list[mp.mpf]) -> float:
    """The largest relative error."""
    return float(max(abs(a - b) / abs(b) if b else abs(a) for a, b in zip(numbers(x), true, strict=True)))

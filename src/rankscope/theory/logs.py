"""Bounds as natural logs: `3^1000` layers of cubing neither overflow nor lose the direction of rounding.

A log below `LOWEST` is raised to it: an upper bound stays one. A log above `-LOWEST` becomes infinite,
since a smaller number would claim more than is proved.
"""

import math
from functools import reduce

import torch
from torch import Tensor

from rankscope.deviation import LOWEST, Scaled

TEN = math.log(10.0)


def log(value: int | float) -> float:
    """log(value), -inf at zero; no number where there is none.

    >>> log(0.0), log(1.0), log(math.nan)
    (-inf, 0.0, nan)
    """
    return math.log(value) if value > 0 else math.nan if math.isnan(value) else -math.inf


def within(value: float) -> float:
    """A log clipped to the range in which a bound is valid."""
    if value > -LOWEST:
        return math.inf
    return LOWEST if -math.inf < value < LOWEST else value


def plus(*logs: float) -> float:
    """log of the sum of what the logs stand for.

    >>> round(math.exp(plus(math.log(2), math.log(3))), 12)
    5.0
    """
    largest = math.nan if any(map(math.isnan, logs)) else max(logs)
    if not math.isfinite(largest):
        return largest
    return largest + math.log(math.fsum(math.exp(log_value - largest) for log_value in logs))


def minus(larger: float, smaller: float) -> float:
    """log of a difference; -inf where nothing is left.

    >>> minus(1.0, 2.0)
    -inf
    """
    if smaller >= larger:
        return -math.inf
    return larger + log(-math.expm1(smaller - larger))


def times(*logs: float) -> float:
    """log of the product: zero times anything is zero."""
    return -math.inf if -math.inf in logs else within(math.fsum(logs))


def product(start: float, factors: list[float]) -> list[float]:
    """Logs of the products of the first 1, 2, .. factors with the start."""
    products = []
    for factor in factors:
        start = math.nan if math.isnan(factor) else times(start, factor)
        products.append(start)
    return products


def log_expm1(value: float) -> float:
    """log(e^x - 1) for x given by its log, at any scale.

    >>> log_expm1(-1e5), round(log_expm1(math.log(2.0)), 12) == round(math.log(math.expm1(2.0)), 12)
    (-100000.0, True)
    """
    if value < -30:
        return value  # e^x - 1 is x
    x = math.exp(value) if value < 700 else math.inf
    return x if x > 40 else math.log(math.expm1(x))


def logs_expm1(logs: Tensor) -> Tensor:
    """log(e^x - 1) of each x that is given by its log: `log_expm1` for a tensor."""
    x = logs.exp()
    moderate = torch.expm1(x.clamp(min=1e-13, max=40.0)).log()
    return torch.where(logs < -30, logs, torch.where(x > 40, x, moderate))


def clipped(logs: Tensor) -> Tensor:
    """The logs, each brought `within` what is known of logs."""
    low = logs.clamp(min=LOWEST).masked_fill(logs == -torch.inf, -torch.inf)  # NaN stays
    return low.masked_fill(logs > -LOWEST, torch.inf)


def log_of(value: Tensor, scale: Tensor) -> float:
    """log of one number held as `e^scale value`."""
    return -math.inf if float(value) == 0 else within(log(float(value)) + float(scale))


def logs_of(value: Tensor, scale: Tensor) -> Tensor:
    """logs of many numbers, held as `e^scale value`."""
    return clipped(torch.where(value == 0, -torch.inf, value.log() + scale))


def sum_of(logs: Tensor, axis: int = -1) -> Tensor:
    """`plus` along an axis; -inf where there is nothing to add up."""
    return logs.logsumexp(axis) if logs.shape[axis] else logs.sum(axis) - torch.inf


def product_of(*logs: Tensor) -> Tensor:
    """The logs of products, as `times` has them, entry by entry."""
    total = reduce(torch.add, logs)
    for log_value in logs:
        total = total.masked_fill(log_value == -torch.inf, -torch.inf)
    return clipped(total)


def sized(x: Scaled) -> Scaled:
    """A tensor rescaled so that its largest entry is one: squares and products stay in range."""
    size = x.largest().clamp(min=1e-300)
    return Scaled(x.value / size.reshape(-1, *[1] * (x.value.ndim - 1)), x.log + torch.log(size))

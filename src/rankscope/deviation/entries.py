"""`Entries`: tensors in which every number has a log-scale of its own, `sign e^log`.

`Scaled` has one scale for all numbers of a sample or head. That is not enough where numbers of very different size
are multiplied: gates of heads (`attention.py`), and scores at their cap (`cap.py`). What is left of the largest may be
less than what underflowed beside it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rankscope.deviation.activations import largest_log, tanh_slope
from rankscope.deviation.scaled import LOWEST, STEEPEST, Scaled, spread
from rankscope.shapes import Bool

HUGE = 1e299  # numbers are cut here


@dataclass(frozen=True)
class Entries:
    """Numbers `sign e^log`; where sign is zero, the log is -inf."""

    sign: Tensor
    log: Tensor

    @classmethod
    def of(cls, part: Scaled) -> "Entries":
        """Return scaled numbers with a scale for every entry."""
        return cls(part.value.sign(), spread(part.log, part.value) + part.value.abs().log())

    def mapped(self, f: Callable[[Tensor], Tensor]) -> "Entries":
        """Return the entries as `f`, which moves or repeats entries of a tensor, leaves them."""
        return Entries(f(self.sign), f(self.log))

    def __mul__(self, other: "Entries") -> "Entries":
        return Entries(self.sign * other.sign, self.log + other.log)

    def __neg__(self) -> "Entries":
        return Entries(-self.sign, self.log)

    def __add__(self, other: "Entries") -> "Entries":
        unit = torch.maximum(self.log, other.log).clamp(min=LOWEST)
        total = self.sign * (self.log - unit).exp() + other.sign * (other.log - unit).exp()
        return Entries(total.sign(), unit + total.abs().log())

    def or_(self, other: "Entries", where: Bool[Tensor, "..."]) -> "Entries":
        """These numbers, and those of `other` where a condition holds."""
        return Entries(torch.where(where, other.sign, self.sign), torch.where(where, other.log, self.log))

    def within(self, mask: Bool[Tensor, "sample ..."]) -> Scaled:
        """The numbers at the scale of each sample's largest, zero outside of the mask."""
        log = self.log.masked_fill(~mask, -torch.inf)
        largest = largest_log(log)
        return Scaled(self.sign * (log - spread(largest, log)).exp(), largest).normalised()


def as_tensor(part: Scaled) -> Tensor:
    """Scaled numbers as an ordinary tensor, cut at 1e299."""
    beyond = (part.log - STEEPEST).clamp(0.0, STEEPEST).exp()
    return (part.explicit() * spread(beyond, part.value)).clamp(-HUGE, HUGE)


def product(factor: Tensor, exponent: Tensor) -> Entries:
    """Return the numbers `factor e^exponent`, entry by entry, at any scale."""
    return Entries(factor.sign(), factor.abs().log() + exponent)


def tanh_difference(Z: Tensor, W: Tensor, step: Scaled, weight: float = 1.0) -> Entries:
    """`tanh(W) - tanh(Z)` times a weight, where `step` is W - Z, cut as `as_tensor` does."""
    slope, exponent = tanh_slope(Z, W, as_tensor(step))
    size = Entries.of(step)
    return Entries(size.sign, size.log.clamp(max=math.log(HUGE))) * product(weight * slope, exponent)

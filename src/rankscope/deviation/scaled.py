"""Numbers at any scale: `e^log V`, one log per sample, or per sample and head.

float64 ends at 1e-308; the residual of pure attention is at 1e-3964 by layer 8. Kept apart from its scale
it never ends: the log of the scale is itself a float64, good down to `LOWEST`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rankscope.deviation.decisions import saves_a_pass
from rankscope.doubled import near_log
from rankscope.metrics import log_readings
from rankscope.shapes import Bool, Float

LogScales = log_readings.LogScales
LOWEST = log_readings.LOWEST
"""Logs end here: what is smaller counts as this, and zero has this log as well."""
STEEPEST = 600.0
"""Exponents are cut to +-this where e^x is formed: 1e-261 and 1e261 act as zero and infinity there."""
WIDEST = 30.0
"""The log within which the entries of V may stray from size one before they are brought back."""

DISTANT = 300.0
"""Logs this far apart are looked at before they are added: what is written at the larger may be zero."""
SMALL = 1e-200
"""Factors below this go into the log."""


@dataclass(frozen=True)
class Scaled:
    """`e^log value`, sample by sample; where heads have logs of their own, head by head."""

    value: Float[Tensor, "..."]
    log: LogScales

    @classmethod
    def plain(cls, value: Float[Tensor, "..."]) -> "Scaled":
        """An ordinary tensor, at scale one."""
        return cls(value, value.new_zeros(len(value)))

    def largest(self) -> LogScales:
        """The size of the largest entry of each sample's value."""
        flat = self.value.flatten(self.log.ndim)
        if not flat.shape[-1]:
            return flat.sum(-1)
        if flat.device.type == "cpu":  # six times as fast as the norm there; elsewhere three kernels more
            return torch.maximum(flat.amax(-1), -flat.amin(-1))
        return torch.linalg.vector_norm(flat, ord=torch.inf, dim=-1)

    def log_size(self) -> LogScales:
        """The log of the largest entry, scale and all; the lowest of all where everything is zero."""
        size = self.largest()
        found = self.log + near_log(size.masked_fill(size == 0, 1.0))
        return found.masked_fill(size == 0, LOWEST).clamp(LOWEST, -LOWEST)

    def normalised(self) -> "Scaled":
        """The same number with entries of about size one; zero at the lowest scale."""
        size = self.largest()
        zero = size == 0
        step = near_log(size.masked_fill(zero, 1.0))
        if saves_a_pass("scaled.normalised", step, lambda: (step.abs() <= WIDEST).all()):
            return Scaled(self.value, self.log.masked_fill(zero, LOWEST).clamp(LOWEST, -LOWEST))
        half = spread((-step / 2).exp(), self.value)  # e^-step itself overflows at subnormal sizes
        value = self.value * half * half
        return Scaled(value, (self.log + step).masked_fill(zero, LOWEST).clamp(LOWEST, -LOWEST))

    def unit(self) -> "Scaled":
        """The same number with its largest entry exactly one, so that squares stay in range."""
        size = self.largest()
        safe = size.masked_fill(size == 0, 1.0)
        log = (self.log + safe.log()).masked_fill(size == 0, LOWEST)
        return Scaled(self.value / spread(safe, self.value), log)

    def __add__(self, other: "Scaled") -> "Scaled":
        """The sum, at the larger of the two scales; zeros at a large scale do not set it."""
        if not saves_a_pass(
            "scaled.add_near", self.log, lambda: ((self.log - other.log).abs() <= DISTANT).all()
        ):
            self, other = self.normalised(), other.normalised()
        if saves_a_pass("scaled.add_swapped", self.log, lambda: (other.log > self.log).all()):
            self, other = other, self
        log = torch.maximum(self.log, other.log)
        value = self.at(log)
        return Scaled(torch.addcmul(value, other.value, spread((other.log - log).exp(), other.value)), log)

    def __mul__(self, factor: float | Tensor) -> "Scaled":
        if (
            isinstance(factor, float) and 0.0 < abs(factor) < SMALL
        ):  # subnormal products have lost their digits
            return Scaled(self.value * math.copysign(1.0, factor), self.log + math.log(abs(factor)))
        return self if factor == 1.0 else Scaled(self.value * factor, self.log)

    def at(self, log: LogScales) -> Float[Tensor, "..."]:
        """The value in units of e^log."""
        step = self.log - log
        if saves_a_pass("scaled.at", step, lambda: (step == 0).all()):
            return self.value
        return self.value * spread(step.clamp(max=STEEPEST).exp(), self.value)

    def explicit(self) -> Float[Tensor, "..."]:
        """An ordinary tensor; beyond 1e+-261 it is cut off."""
        return self.at(torch.zeros_like(self.log))

    def by_head(self) -> "Scaled":
        """[batch, head, ...] with a log for each head."""
        return Scaled(self.value, self.log[:, None].expand(self.value.shape[:2])).normalised()

    def together(self) -> "Scaled":
        """The heads of each sample at one scale, that of the largest."""
        log = self.log.amax(1)
        return Scaled(self.at(log[:, None].expand_as(self.log)), log)

    def mapped(self, linear: Callable[[Tensor], Tensor]) -> "Scaled":
        """The image under a linear map."""
        return Scaled(linear(self.value), self.log)


def chosen(pick: Bool[Tensor, "*batch"], a: Scaled, b: Scaled) -> Scaled:
    """a where `pick`, b elsewhere, sample by sample."""
    return Scaled(torch.where(spread(pick, a.value), a.value, b.value), torch.where(pick, a.log, b.log))


def spread(per_sample: Tensor, like: Tensor) -> Tensor:
    """[batch] -> [batch, 1, 1, ...], to multiply what has more axes."""
    return per_sample.reshape(*per_sample.shape, *[1] * (like.ndim - per_sample.ndim))

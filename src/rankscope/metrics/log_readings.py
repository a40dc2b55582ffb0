"""Readings at any scale, for the rules that metrics bring for deviation arithmetic.

Deviation arithmetic carries tokens as `1 x^T + e^s R`, so what they differ by may be 1e-4000. A metric's
`rule` is called by `deviation/readings.py` with one of the two interfaces below, `ScaledTokens` or
`ScaledPattern`, computes a number of size one and its log-scale, and makes a reading of them here: the value
is 0 where it underflows, its log10 intact, and there is no floor.
"""

import math
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from rankscope.metrics.base import Reading
from rankscope.metrics.rows import PatternRows
from rankscope.shapes import Bool, Float

LogScales = Float[Tensor, "*batch"]

LOWEST = -1e300  # logs end here: 10^(-4e299). What is smaller counts as this, and zero has this log as well.
FARTHEST = 1e250  # logs beyond +-this are not known: scores beyond e^600 are cut
CLIPPED = 1e100
"""Logs of patterns beyond this may be of scores that lost their digits to larger ones, or were cut at e^600."""
SMALLEST = 5e-324
UNIT = torch.finfo(torch.float64).eps


@runtime_checkable
class ScaledTensor(Protocol):
    """A tensor `e^log value`: one log for each sample, or for each sample and head."""

    value: Float[Tensor, "..."]  # the numbers, of size one
    log: LogScales  # the log of their scale


@runtime_checkable
class ScaledTokens(Protocol):
    """What deviation arithmetic offers a rule of a metric of tokens."""

    padding: Bool[Tensor, "batch token"]  # True at padded tokens
    residual: ScaledTensor  # X minus its mean token, `[batch, token, width]`: the largest entry is of size one
    tokens: Float[Tensor, "batch token width"]  # X itself in units of `e^log`, as ordinary float64 tokens
    log: LogScales  # the log-scale of X, one for each sample
    equal: Bool[Tensor, " batch"]  # True where all tokens of a sample are exactly equal
    close: Bool[Tensor, " batch"]
    """True where the common token is large beside what tokens differ by, and is kept apart from it."""
    directions: ScaledTensor  # the residual of the unit vectors `x_i / |x_i|`
    norms: dict[str, LogScales]
    """Norms of the residual's value that were taken so far, and of X (`... of tokens`): metrics share them."""


@runtime_checkable
class ScaledPattern(Protocol):
    """What deviation arithmetic offers a rule of a metric of attention, whether P is held or made by rows."""

    padding: Bool[Tensor, "batch token"]  # True at padded tokens
    differences: tuple[Float[Tensor, "batch head token token"] | PatternRows, LogScales]
    """`P - 1 p^T`, p a row that all rows share, in units of `e^log`, a log for each head."""

    def log_rows(self, number: Callable[[Tensor], Tensor]) -> Float[Tensor, "batch head token"] | None:
        """A number of every row, computed from rows of log P; None where P is not a softmax."""

    def matrix(self) -> Float[Tensor, "batch head token token"]:
        """P as an ordinary tensor; a rule that asks for it cannot have `rule_streams`."""


def log_of(value: Tensor, log: LogScales) -> LogScales:
    """log(value e^log); the lowest of all where the value is zero."""
    total = value.masked_fill(value == 0, 1.0).log() + log
    return torch.where(value == 0, torch.full_like(total, LOWEST), total).clamp(LOWEST, -LOWEST)


def reading_of_tokens(log: LogScales, tokens: ScaledTokens) -> Reading:
    """A reading of tokens from its log, -inf of equal tokens; the floor is 0 but where the log is out of reach."""
    empty = tokens.padding.all(-1)
    equal = tokens.equal
    value = log.exp()
    floor = torch.where((log.abs() > FARTHEST) & ~equal, value.clamp(min=SMALLEST), torch.zeros_like(log))
    log10 = torch.where(equal, torch.full_like(log, -torch.inf), log / math.log(10))
    return Reading(*(part.masked_fill(empty, torch.nan) for part in (value, log10, floor)))


def reading_of_pattern(log: LogScales) -> Reading:
    """A reading of attention from its log, head by head; one out of reach is marked."""
    marked = (log < -CLIPPED) & (log > LOWEST)
    log10 = torch.where(log <= LOWEST, torch.full_like(log, -torch.inf), log / math.log(10))
    return Reading(log.exp(), log10, torch.where(marked, SMALLEST, torch.zeros_like(log)))

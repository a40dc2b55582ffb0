"""Metrics of a step in deviation arithmetic.

Called by `profiles/readers.py` for each layer of a pass, and by `profiles/agreement.py` for the second pass. A
metric that brings a `rule` is read by it at any scale, off the interfaces of `metrics/log_readings.py`, which
the two classes below are. Others are read off ordinary float64 tokens in units of their own size, `X = e^s
Y`, with float64's floor: a metric of degree k is `e^{k s}` times that of Y.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rankscope.deviation.attention import DeviationPattern
from rankscope.deviation.by_rows import PatternByRows
from rankscope.deviation.norms import normalise
from rankscope.deviation.propagate import DeviationStep
from rankscope.deviation.state import LOWEST, LogScales, Scaled, State
from rankscope.metrics import SMALLEST, UNIT, Metric, PatternRows, Reading
from rankscope.nets import NormWeights

LARGEST = torch.finfo(torch.float64).max


def read(metric: Metric, step: DeviationStep) -> Reading | None:
    """The metric of one step; None where the step has no attention, heads or routing to read it off."""
    padding = ~step.state.valid.mask
    if metric.of == "routing":
        return None if step.routing is None else metric.read(step.routing, padding, unit=UNIT)
    if metric.of == "attention":
        P = step.attention
        if P is None:
            return None
        if isinstance(P, PatternByRows):
            return _of_rows(metric, P)
        return (
            metric.read(P.matrix(), padding, unit=UNIT) if metric.rule is None else metric.rule(_Attention(P, padding))
        )
    if metric.of == "tokens":
        return _of_state(metric, step.state)
    if step.heads is None:
        return None
    # What each head adds: a metric of tokens, [batch, head].
    reading = _of_state(replace(metric, of="tokens"), step.heads.contributions(step.state.valid))
    shape = (len(padding), -1)
    return Reading(reading.value.view(shape), reading.log10.view(shape), reading.floor.view(shape))


def reads_rows(metric: Metric) -> bool:
    """Whether a metric is read off rows of attention, where P is too large to be held."""
    return metric.streams and (metric.rule is None or metric.rule_streams)


class _StateTokens:
    """A state as rules of metrics of tokens see it: `ScaledTokens`."""

    def __init__(self, state: State) -> None:
        self.state, self.log, self.norms = state, state.log, state.sizes
        self.padding, self.close = ~state.valid.mask, state.x.log > LOWEST

    @property
    def residual(self) -> Scaled:
        return self.state.residual

    @property
    def tokens(self) -> Tensor:
        return self.state.scaled_tokens

    @property
    def equal(self) -> Tensor:
        return self.state.equal

    @property
    def directions(self) -> Scaled:
        return normalise(self.state, "scale", NormWeights(), 0.0).residual


@dataclass(frozen=True, eq=False)
class _Attention:
    """Attention, held or with rows that are made as they are asked for, as rules of metrics see it: `ScaledPattern`."""

    pattern: DeviationPattern | PatternByRows
    padding: Tensor  # by rows, valid tokens come first

    @property
    def differences(self) -> tuple[Tensor | PatternRows, LogScales]:
        P = self.pattern
        if isinstance(P, PatternByRows):
            return P.by_head(lambda of_head, rows: of_head.Delta(rows)), P.log
        Delta = P.by_head
        return Delta.value, Delta.log

    def log_rows(self, number: Callable[[Tensor], Tensor]) -> Tensor | None:
        P = self.pattern
        if P.logits is None or P.signed or not self.padding.shape[1]:
            return None
        return P.of_rows(lambda rows: number(P.log_matrix(rows)))

    def matrix(self) -> Tensor:
        if isinstance(self.pattern, PatternByRows):
            raise NotImplementedError("a rule with rule_streams=True must not ask for the matrix")
        return self.pattern.matrix()


def _of_state(metric: Metric, state: State) -> Reading:
    """By its rule; of a metric without one, in units of the tokens' own size. NaN of a sample that holds NaN."""
    state, broken = state.finite
    if metric.rule is not None:
        reading = metric.rule(_StateTokens(state))
    else:
        reading = metric.read(state.scaled_tokens, ~state.valid.mask, unit=UNIT)
        reading = _rescaled(reading, metric.degree * state.log) if metric.degree else reading
    if broken is None:
        return reading
    return Reading(*(part.masked_fill(broken, torch.nan) for part in (reading.value, reading.log10, reading.floor)))


def _of_rows(metric: Metric, P: PatternByRows) -> Reading:
    """By rows that are made as they are asked for."""
    if metric.rule is not None:
        return metric.rule(_Attention(P, ~P.maker.valid.mask))
    valid, by_row = P.maker.valid.mask, metric.by_row
    if by_row is not None:
        numbers = P.of_rows(lambda rows: by_row(P.matrix(rows), valid[:, None]))
        return metric.from_rows(numbers, valid, UNIT)
    assert metric.by_head is not None
    return metric.from_heads(metric.by_head(P.by_head(lambda P, rows: P.matrix(rows))), UNIT)


def _rescaled(reading: Reading, log: LogScales) -> Reading:
    """A reading of tokens in units of e^log, in units of one: 0 or infinite where that leaves the range."""
    log10 = reading.log10 + log / math.log(10)
    floor = torch.pow(10.0, reading.floor.log10() + log / math.log(10))
    floor = torch.where(reading.below_floor, floor.clamp(min=SMALLEST), floor.clamp(max=LARGEST))
    return Reading(reading.value.sign() * torch.pow(10.0, log10), log10, floor)

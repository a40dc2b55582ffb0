"""Metrics of a state, in log form: what makes sense at any scale is read at any scale.

Residuals, their relative forms, `1 - cos` and Dobrushin's coefficient are read off R and its log-scale: the
value is 0 where it underflows, its log10 intact, and there is no floor. The shape of the residual (its ranks,
its singular values) does not depend on its scale. Everything else is read off ordinary float64 tokens, with
float64's floor.
"""

import math

import torch
from torch import Tensor

from rankscope.deviation.norms import normalise
from rankscope.deviation.propagate import DeviationStep
from rankscope.deviation.scaled import LOWEST, Logs, Scaled
from rankscope.deviation.state import State
from rankscope.metrics import Metric, Reading, dobrushin, numerical_rank
from rankscope.metrics.centre import Centre, Norm, centred
from rankscope.metrics.residual import NORMS
from rankscope.metrics.tokens import tokens
from rankscope.nets.weights import NormWeights

UNIT = torch.finfo(torch.float64).eps
SMALLEST = 5e-324
RESIDUALS: dict[str, Norm] = {
    "residual": "composite",
    "mu": "frobenius",
    "spectral_residual": "spectral",
    "max_residual": "max",
}
SHAPES = ("residual_stable_rank", "residual_effective_rank", "residual_singular_ratio")


def read(each: Metric, step: DeviationStep) -> Reading | None:
    """The metric of one step; None where the step has no attention to read it off."""
    state, base = step.state, each.name.partition("@")[0]
    if each.of == "attention":
        return None if step.attention is None else _of_attention(each, step)
    if base.removeprefix("relative_") in RESIDUALS:
        return _in_logs(_residual(each.name, state), state)
    if base == "high_frequency_share":
        return _in_logs(2 * _residual("relative_mu", state), state)
    if base in ("mean_cosine_gap", "max_cosine_gap"):
        return _cosine_gap(each, state)
    padding = ~state.real.rows
    if base in SHAPES or base == "affine_rank":
        R = _unit(state.centred()[1]).value
        compute = numerical_rank if base == "affine_rank" else each.compute
        value = compute(R, padding)
        return Reading.of(value, torch.zeros_like(value))
    log = state.log
    reading = each.read(state.tokens(log), padding, unit=UNIT)
    return reading if each.scale is None else _rescaled(reading, log)


def _residual(name: str, state: State) -> Logs:
    """The log of a residual, or of its share of the tokens' norm."""
    name, _, centre = name.partition("@")
    norm = RESIDUALS[name.removeprefix("relative_")]
    padding = ~state.real.rows
    R = _unit(state.centred()[1])
    about: Centre = centre or "mean"  # type: ignore[assignment]
    deviation = R.value if about == "mean" else centred(tokens(R.value, padding), about, norm)
    log = _log(NORMS[norm](deviation), R.log)
    if not name.startswith("relative_"):
        return log
    whole = _log(NORMS[norm](state.tokens(state.log)), state.log)
    return torch.where(log <= LOWEST, log, log - whole)


def _cosine_gap(each: Metric, state: State) -> Reading:
    """`|u_i - u_j|^2 / 2` of the unit vectors, whose deviation is a norm's."""
    padding = ~state.real.rows
    plain = each.read(state.tokens(state.log), padding, unit=UNIT)
    directions = _unit(normalise(state, "scale", NormWeights(), 0.0).centred()[1])
    if each.name == "mean_cosine_gap":
        number = (state.real.number[:, 0] - 1).clamp(min=1)
        square = NORMS["frobenius"](directions.value).square() / number
    else:
        distance = torch.cdist(directions.value, directions.value)
        pairs = state.real.rows[:, :, None] & state.real.rows[:, None, :]
        square = distance.masked_fill(~pairs, 0.0).flatten(1).amax(1).square() / 2
    fine = _in_logs(_log(square, 2 * directions.log), state)
    # Far apart, tokens are read as they are: one of them may be zero and point nowhere.
    close = state.x.log > LOWEST
    return Reading(
        torch.where(close, fine.value, plain.value),
        torch.where(close, fine.log10, plain.log10),
        torch.where(close, fine.floor, plain.floor),
    )


def _of_attention(each: Metric, step: DeviationStep) -> Reading:
    assert step.attention is not None
    padding = ~step.state.real.rows
    if each.name != "dobrushin":
        return each.read(step.attention.matrix(), padding, unit=UNIT)
    # Rows of P differ by rows of Delta.
    Delta = step.attention.Delta
    value = dobrushin(Delta.value, padding)
    log = torch.where(value == 0, torch.full_like(value, LOWEST), value.log() + Delta.log[:, None])
    return Reading(log.exp(), _log10(log), torch.zeros_like(log))


def _unit(x: Scaled) -> Scaled:
    """With its largest entry of size one, so that squares stay in range."""
    size = x.largest()
    safe = size.masked_fill(size == 0, 1.0)
    return Scaled(x.value / safe[:, None, None], (x.log + safe.log()).masked_fill(size == 0, LOWEST))


def _log(value: Tensor, log: Logs) -> Logs:
    """log(value e^log); the lowest of all where the value is zero."""
    found = value.masked_fill(value == 0, 1.0).log() + log
    return torch.where(value == 0, torch.full_like(found, LOWEST), found).clamp(LOWEST, -LOWEST)


def _in_logs(log: Logs, state: State) -> Reading:
    """A reading from its log: zeros have log10 -inf; what fell through the lowest log is at the floor."""
    empty = ~state.real.rows.any(-1)
    zero = state.R.largest() == 0
    sunk = (log <= LOWEST) & ~zero
    value = log.clamp(max=700.0).exp().masked_fill(empty, torch.nan)
    floor = torch.where(sunk, torch.full_like(log, SMALLEST), torch.zeros_like(log))
    return Reading(
        value,
        torch.where(zero, torch.full_like(log, -torch.inf), log / math.log(10)).masked_fill(empty, torch.nan),
        floor.masked_fill(empty, torch.nan),
    )


def _log10(log: Tensor) -> Tensor:
    return torch.where(log <= LOWEST, torch.full_like(log, -torch.inf), log / math.log(10))


def _rescaled(reading: Reading, log: Logs) -> Reading:
    """A reading of tokens in units of e^log, in units of one."""
    factor = log.clamp(-700, 700).exp()
    return Reading(reading.value * factor, reading.log10 + log / math.log(10), reading.floor * factor)

"""Metrics of a state, in log form: what makes sense at any scale is read at any scale.

Residuals, their relative forms, `1 - cos` and Dobrushin's coefficient are read off R and its log-scale: the
value is 0 where it underflows, its log10 intact, and there is no floor. The shape of the residual (its ranks,
its singular values) does not depend on its scale. Everything else is read off ordinary float64 tokens, with
float64's floor.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from rankscope.deviation.norms import normalise
from rankscope.deviation.propagate import DeviationStep
from rankscope.deviation.scaled import LOWEST, Logs, Scaled
from rankscope.deviation.state import State
from rankscope.metrics import Metric, Reading, dobrushin, numerical_rank
from rankscope.metrics.catalogue import ROUNDING
from rankscope.metrics.centre import Centre, Norm, centred
from rankscope.metrics.residual import NORMS
from rankscope.metrics.tokens import tokens
from rankscope.nets.norms import NormWeights

UNIT = torch.finfo(torch.float64).eps
SMALLEST = 5e-324
DOUBTFUL = 1e-3
"""The share of rounding in R above which a residual is called noise."""
RESIDUALS: dict[str, Norm] = {
    "residual": "composite",
    "mu": "frobenius",
    "spectral_residual": "spectral",
    "max_residual": "max",
}
SHAPES = ("residual_stable_rank", "residual_effective_rank", "residual_singular_ratio")


def read(each: Metric, step: DeviationStep) -> Reading | None:
    """The metric of one step; None where the step has no attention or no heads to read it off."""
    if each.of == "attention":
        return None if step.attention is None else _of_attention(each, step)
    if each.of == "heads":
        return None if step.heads is None else _of_heads(each, step)
    return _of_state(each, step.state)


def _of_heads(each: Metric, step: DeviationStep) -> Reading:
    """Of what each head adds: a metric of tokens, `[batch, head]`."""
    assert step.heads is not None
    plain = replace(each, name=each.name.removeprefix("head_"), of="tokens")
    reading = _of_state(plain, step.heads.contributions(step.state.real))
    shape = (len(step.state.real.rows), -1)
    return Reading(reading.value.view(shape), reading.log10.view(shape), reading.floor.view(shape))


def _of_state(each: Metric, state: State) -> Reading:
    """A metric of tokens."""
    base = each.name.partition("@")[0]
    if base.removeprefix("relative_") in RESIDUALS:
        return _in_logs(_residual(each.name, state), state)
    if base == "high_frequency_share":
        return _in_logs(2 * _residual("relative_mu", state), state)
    if base in ("mean_cosine_gap", "max_cosine_gap"):
        return _cosine_gap(each, state)
    padding = ~state.real.rows
    if base == "affine_rank":
        value = numerical_rank(_unit(state.centred()[1]).value, padding)
        return Reading.of(value, torch.zeros_like(value))
    if base in SHAPES:
        # As uncertain as the residual is: a share of the largest it could be, one.
        value = each.compute(_unit(state.centred()[1]).value, padding)
        return Reading.of(value, ROUNDING * state.doubt.exp() * (value if "rank" in base else 1.0))
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
        square = distance.masked_fill(~pairs, 0.0).flatten(1)
        square = (square.amax(1) if square.shape[1] else square.sum(1)).square() / 2
    log = _log(square, 2 * directions.log)
    fine = _in_logs(log, state)
    # Directions are known to the rounding of what tokens differ by.
    unknown = log <= 2 * (_residual("relative_mu", state) + state.doubt + math.log(ROUNDING))
    fine = Reading(fine.value, fine.log10, fine.floor.masked_fill(unknown & (log > LOWEST), SMALLEST))
    fine = Reading(fine.value, fine.log10, torch.maximum(fine.floor, fine.value * (fine.floor > 0)))
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
    """A reading from its log. Zeros have log10 -inf. The floor is 0, but where the value is noise: where
    rounding is as large as R itself, or the log has reached its lowest."""
    empty = ~state.real.rows.any(-1)
    zero = state.R.largest() == 0
    value = log.exp()
    noise = (state.doubt >= math.log(DOUBTFUL)) | (log <= LOWEST)
    floor = torch.where(noise & ~zero, value.clamp(min=SMALLEST), torch.zeros_like(log))
    log10 = torch.where(zero, torch.full_like(log, -torch.inf), log / math.log(10))
    return Reading(*(part.masked_fill(empty, torch.nan) for part in (value, log10, floor)))


def _log10(log: Tensor) -> Tensor:
    return torch.where(log <= LOWEST, torch.full_like(log, -torch.inf), log / math.log(10))


def _rescaled(reading: Reading, log: Logs) -> Reading:
    """A reading of tokens in units of e^log, in units of one: 0 or infinite where that leaves the range."""
    log10 = reading.log10 + log / math.log(10)
    floor = torch.pow(10.0, reading.floor.log10() + log / math.log(10))
    return Reading(torch.pow(10.0, log10), log10, floor)

"""Metrics of a state, in log form: what makes sense at any scale is read at any scale.

`RULES` has those: residuals, their relative forms, `1 - cos` and Dobrushin's coefficient are read off R and
its log-scale: the value is 0 where it underflows, its log10 intact, and there is no floor. The shape of the
residual (its ranks, its singular values) does not depend on its scale. Everything else is read off ordinary
float64 tokens in units of their own size, `X = e^s Y`, with float64's floor: a metric of degree k is
`e^{k s}` times that of Y.
"""

import math
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rankscope.deviation.attention import DeviationPattern
from rankscope.deviation.blocks import PatternByRows
from rankscope.deviation.norms import normalise
from rankscope.deviation.propagate import DeviationStep
from rankscope.deviation.scaled import LOWEST, LogScales
from rankscope.deviation.state import State
from rankscope.metrics import METRICS, Metric, Reading, attention, contraction, cosine, residuals, spectrum
from rankscope.metrics.catalogue import ROUNDING
from rankscope.metrics.centre import Centre, Norm, centred
from rankscope.metrics.rows import AT_ONCE
from rankscope.metrics.tokens import tokens
from rankscope.nets.norms import NormWeights

UNIT = torch.finfo(torch.float64).eps
LEAST = -1e250
"""Logs beyond +-this are not known: scores beyond e^600 are cut."""
SMALLEST, LARGEST = 5e-324, torch.finfo(torch.float64).max


def read(each: Metric, step: DeviationStep) -> Reading | None:
    """The metric of one step; None where the step has no attention, heads or routing to read it off."""
    if each.of == "routing":
        padding = ~step.state.valid.mask
        return None if step.routing is None else each.read(step.routing, padding, unit=UNIT)
    if each.of == "attention":
        if step.rows is not None:
            return _of_rows(each, step.rows)
        return None if step.attention is None else _of_attention(each, step.attention, ~step.state.valid.mask)
    if each.of == "tokens":
        return _of_state(each, step.state)
    if step.heads is None:
        return None
    # What each head adds: a metric of tokens, [batch, head].
    reading = _of_state(replace(each, of="tokens"), step.heads.contributions(step.state.valid))
    shape = (len(step.state.valid.mask), -1)
    return Reading(reading.value.view(shape), reading.log10.view(shape), reading.floor.view(shape))


def _of_state(each: Metric, state: State) -> Reading:
    """By its rule; of a metric without one, in units of the tokens' own size."""
    rule = _rule(each)
    if rule is not None:
        return rule(state)
    reading = each.read(state.whole, ~state.valid.mask, unit=UNIT)
    return _rescaled(reading, each.degree * state.log) if each.degree else reading


def _of_attention(each: Metric, P: DeviationPattern, padding: Tensor) -> Reading:
    rule = _rule(each)
    return each.read(P.matrix(), padding, unit=UNIT) if rule is None else rule(P, padding)


def reads_rows(each: Metric) -> bool:
    """Whether it is read off rows of attention, where that is too large to be held."""
    return each.streams and each.rule is None


def _of_rows(each: Metric, P: PatternByRows) -> Reading:
    """By rows that are made as they are asked for."""
    valid = P.maker.valid.mask
    if each.compute is attention.entropy:
        return _mean_entropy(P.of_rows(lambda rows: _entropy_of_rows(P.log_matrix(rows))), ~valid)
    if each.compute is attention.dobrushin:
        return _of_difference(contraction.by_head(P.by_head(lambda P, rows: P.Delta(rows))), P.log)
    by_row = each.by_row
    if by_row is not None:
        numbers = P.of_rows(lambda rows: by_row(P.matrix(rows), valid[:, None]))
        return each.of_rows(numbers, valid, UNIT)
    assert each.by_head is not None
    return each.of_heads(each.by_head(P.by_head(lambda P, rows: P.matrix(rows))), UNIT)


def _rule(each: Metric) -> Callable[..., Reading] | None:
    """Its own, or that of the function it computes, which is about another centre where the metric is."""
    if each.rule is not None:
        return each.rule
    compute: Callable[..., Tensor] = each.compute
    options: dict[str, Any] = {}
    if isinstance(compute, partial):
        options, compute = compute.keywords, compute.func
    rule = RULES.get(compute) if isinstance(compute, Hashable) else None
    return partial(rule, **options) if rule is not None else None


def _residual(state: State, norm: Norm, centre: Centre = "mean", relative: bool = False) -> LogScales:
    """The log of a residual, or of its share of the tokens' norm."""
    log = _size(state, norm) if centre == "mean" else _about(state, norm, centre)
    if not relative:
        return log
    whole = _log(residuals.NORMS[norm](state.whole), state.log)
    return torch.where(log <= LOWEST, log, log - whole)


def _size(state: State, norm: Norm) -> LogScales:
    """About the mean."""
    if norm not in state.sizes:
        state.sizes[norm] = _log(residuals.NORMS[norm](state.residual.value), state.residual.log)
    return state.sizes[norm]


def _about(state: State, norm: Norm, centre: Centre) -> LogScales:
    R = state.residual
    deviation = centred(tokens(R.value, ~state.valid.mask), centre, norm)
    return _log(residuals.NORMS[norm](deviation), R.log)


def _of_residual(
    state: State, norm: Norm, relative: bool, centre: Centre = "mean", power: int = 1
) -> Reading:
    return _in_logs(power * _residual(state, norm, centre, relative), state)


def _affine_rank(state: State) -> Reading:
    """A singular value near the tolerance, or up to a thousand times above it, may be rounding: then it is
    marked."""
    R, padding = state.residual.value, ~state.valid.mask
    value = spectrum.numerical_rank(R, padding)
    low, high = (spectrum.numerical_rank(R, padding, unit=UNIT * share) for share in (1 / 3, 1e3))
    return Reading.of(value, torch.where(low == high, 0.0, value.clamp(min=1.0)))


def _shape(state: State, compute: Callable[..., Tensor], bounded: bool = False) -> Reading:
    """As uncertain as rounding: a share of the value, or of the largest it could be, one."""
    value = compute(state.residual.value, ~state.valid.mask)
    return Reading.of(value, ROUNDING * UNIT * (torch.ones_like(value) if bounded else value))


def _cosine_gap(state: State, gap: Callable[..., Tensor]) -> Reading:
    """`|u_i - u_j|^2 / 2` of the unit vectors, whose deviation is a norm's."""
    plain = Metric("gap", gap, power=2).read(state.whole, ~state.valid.mask, unit=UNIT)
    directions = normalise(state, "scale", NormWeights(), 0.0).residual
    if gap is cosine.mean_cosine_gap:
        number = (state.valid.count[:, 0] - 1).clamp(min=1)
        square = residuals.NORMS["frobenius"](directions.value).square() / number
    else:
        square = _widest(directions.value, state.valid.mask).square() / 2
    log = _log(square, 2 * directions.log)
    fine = _in_logs(log, state)
    # Directions are known to the rounding of what tokens differ by.
    known_to = _residual(state, "frobenius", relative=True) + math.log(ROUNDING * UNIT)
    unknown = log <= 2 * known_to
    fine = Reading(fine.value, fine.log10, fine.floor.masked_fill(unknown & (log > LOWEST), SMALLEST))
    fine = Reading(fine.value, fine.log10, torch.maximum(fine.floor, fine.value * (fine.floor > 0)))
    # Far apart, tokens are read as they are: one of them may be zero and point nowhere.
    close = state.x.log > LOWEST
    return Reading(
        torch.where(close, fine.value, plain.value),
        torch.where(close, fine.log10, plain.log10),
        torch.where(close, fine.floor, plain.floor),
    )


def _widest(R: Tensor, valid: Tensor) -> Tensor:
    """The largest distance of two valid tokens of each sample, all pairs of some tokens at a time."""
    batch, n = valid.shape
    widest = R.new_zeros(batch)
    step = max(1, AT_ONCE // max(1, 8 * batch * n))
    for start in range(0, n, step):
        here = slice(start, start + step)
        pairs = valid[:, here, None] & valid[:, None, :]
        found = torch.cdist(R[:, here], R).masked_fill(~pairs, 0.0)
        widest = torch.maximum(widest, found.flatten(1).amax(1))
    return widest


def _dobrushin(P: DeviationPattern, padding: Tensor) -> Reading:
    """Rows of P differ by rows of Delta."""
    Delta = P.by_head
    return _of_difference(attention.dobrushin(Delta.value, padding), Delta.log)


def _of_difference(value: Tensor, log: LogScales) -> Reading:
    """A number of rows of Delta, in units of e^log."""
    return _of_heads(torch.where(value == 0, torch.full_like(value, LOWEST), value.log() + log))


def _entropy(P: DeviationPattern, padding: Tensor) -> Reading:
    """Mean over rows of `-sum_j P_ij log P_ij`, in logs. The largest weight of a row is `1 - s`, s the sum of
    the others: `-(1 - s) log(1 - s)`."""
    if P.logits is None or P.signed or not padding.shape[1]:
        weights = P.matrix()  # a sum of two parts: one of zero may be rounding, to either side
        weights = weights.masked_fill(weights.abs() < ROUNDING * UNIT, 0.0)
        return METRICS["entropy"].read(weights, padding, unit=UNIT)
    return _mean_entropy(_entropy_of_rows(P.logits.log_softmax(P.visible)), padding)


def _entropy_of_rows(log_P: Tensor) -> Tensor:
    """The log of each row's."""
    small = log_P.scatter(-1, log_P.argmax(-1, keepdim=True), -torch.inf)
    terms = (small + (-small).log()).masked_fill(small == -torch.inf, -torch.inf).logsumexp(-1)
    log_s = small.logsumexp(-1)
    s = log_s.exp()
    largest = torch.where(log_s < -40, log_s, (-(1 - s) * torch.log1p(-s)).log())
    return torch.logaddexp(terms, largest)


def _mean_entropy(rows: Tensor, padding: Tensor) -> Reading:
    """Of the logs of rows' entropies."""
    rows = rows.masked_fill(padding[:, None], -torch.inf)
    log = rows.logsumexp(-1) - (~padding).sum(-1, keepdim=True).double().log()
    found = _of_heads(log.clamp(min=LOWEST))
    empty = padding.all(-1, keepdim=True).expand_as(log)
    return Reading(*(part.masked_fill(empty, torch.nan) for part in (found.value, found.log10, found.floor)))


def _of_heads(log: Tensor) -> Reading:
    """A reading of attention from its log; one out of reach is marked."""
    marked = (log < LEAST) & (log > LOWEST)
    return Reading(log.exp(), _log10(log), torch.where(marked, SMALLEST, torch.zeros_like(log)))


_NORM_OF: dict[Norm, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "composite": (residuals.residual, residuals.relative_residual),
    "frobenius": (residuals.mu, residuals.relative_mu),
    "spectral": (residuals.spectral_residual, residuals.relative_spectral_residual),
    "max": (residuals.max_residual, residuals.relative_max_residual),
}
RULES: dict[Callable[..., Tensor], Callable[..., Reading]] = {
    **{pair[0]: partial(_of_residual, norm=norm, relative=False) for norm, pair in _NORM_OF.items()},
    **{pair[1]: partial(_of_residual, norm=norm, relative=True) for norm, pair in _NORM_OF.items()},
    residuals.high_frequency_share: partial(_of_residual, norm="frobenius", relative=True, power=2),
    spectrum.affine_rank: _affine_rank,
    spectrum.residual_stable_rank: partial(_shape, compute=spectrum.residual_stable_rank),
    spectrum.residual_effective_rank: partial(_shape, compute=spectrum.residual_effective_rank),
    spectrum.residual_singular_ratio: partial(_shape, compute=spectrum.residual_singular_ratio, bounded=True),
    cosine.mean_cosine_gap: partial(_cosine_gap, gap=cosine.mean_cosine_gap),
    cosine.max_cosine_gap: partial(_cosine_gap, gap=cosine.max_cosine_gap),
    attention.dobrushin: _dobrushin,
    attention.entropy: _entropy,
}
"""Of the functions that can be read at any scale; a metric of one's own brings its `rule`."""


def _log(value: Tensor, log: LogScales) -> LogScales:
    """log(value e^log); the lowest of all where the value is zero."""
    found = value.masked_fill(value == 0, 1.0).log() + log
    return torch.where(value == 0, torch.full_like(found, LOWEST), found).clamp(LOWEST, -LOWEST)


def _in_logs(log: LogScales, state: State) -> Reading:
    """A reading from its log. Zeros have log10 -inf. The floor is 0, but where the log is out of reach."""
    empty = ~state.valid.mask.any(-1)
    zero = state.R.largest() == 0
    value = log.exp()
    floor = torch.where((log.abs() > -LEAST) & ~zero, value.clamp(min=SMALLEST), torch.zeros_like(log))
    log10 = torch.where(zero, torch.full_like(log, -torch.inf), log / math.log(10))
    return Reading(*(part.masked_fill(empty, torch.nan) for part in (value, log10, floor)))


def _log10(log: Tensor) -> Tensor:
    return torch.where(log <= LOWEST, torch.full_like(log, -torch.inf), log / math.log(10))


def _rescaled(reading: Reading, log: LogScales) -> Reading:
    """A reading of tokens in units of e^log, in units of one: 0 or infinite where that leaves the range, and
    noise where it was."""
    log10 = reading.log10 + log / math.log(10)
    floor = torch.pow(10.0, reading.floor.log10() + log / math.log(10))
    floor = torch.where(reading.below_floor, floor.clamp(min=SMALLEST), floor.clamp(max=LARGEST))
    return Reading(reading.value.sign() * torch.pow(10.0, log10), log10, floor)

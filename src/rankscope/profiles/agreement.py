"""Compares the readings of two passes, and marks those that rounding decided.

Called by `steps.py` for each layer: `checked` where a second pass ran beside the first (`check=True`), `confirmed`
where doubled precision did. A reading holds to as many digits as both passes agree on. The second pass
(`deviation/second_pass.py`) runs by plain float64 rules where float64 can **resolve** what tokens differ by: what it
contradicts is marked, unless the two differ by less than float64's own floor. Then, and where float64 resolves nothing,
the layer is run once more by **perturbed** rules of deviation arithmetic, and read again (`deviation/readings.py`).
What agrees nearly, to six digits and not to nine, may be float64's own rounding that has grown over the layers: a pass
by perturbed rules from the first layer on decides. Numbers that agree by chance are found by comparing what they are
read off: tokens, patterns, and what else a metric is `sensitive_to`.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rankscope.deviation import DeviationStep, State, comparison
from rankscope.deviation.attention import DeviationPattern
from rankscope.deviation.confirm import Confirmation
from rankscope.deviation.readings import read
from rankscope.deviation.scaled import spread
from rankscope.deviation.second_pass import SecondPassLayer, SecondPassStep
from rankscope.deviation.state import ValidTokens
from rankscope.metrics import Metric, Reading
from rankscope.metrics.log_readings import SMALLEST, UNIT
from rankscope.nets import Step
from rankscope.profiles.readings import Readings
from rankscope.shapes import Float

AGREED = 1e-9  # relative difference up to which two passes agree
NEAR = 1e-6  # that up to which rounding of the second pass alone may be the reason, where a third one agrees
NOISY = 100 * torch.finfo(torch.float64).eps
"""The distance of two passes, for each token or width, above which counts are taken again at a tolerance of it."""
COUNTED = 100.0  # how many times the distance of two passes a singular value must be to be no rounding
PERTURBED = 8.0  # the tolerances of a count up to which a perturbed residual may have singular values of that alone
BLIND = 1e3  # float64's floors, up to which a difference from float64 says nothing

Errors = Float[Tensor, "..."]


def checked(readings: Readings, plain: Readings | None, step: DeviationStep, second: SecondPassStep) -> Readings:
    """Readings with their digits, marked where the second pass does not agree; `plain` are its plain readings."""
    patterns = any(metric.of == "attention" for metric, _ in readings)
    states = _states(comparison.state_distance, step.state, second)
    inputs = {"tokens": states, "attention": _patterns(step, second) if patterns else None}
    references = [None] * len(readings) if plain is None else [reading for _, reading in plain]
    return [
        (metric, _marked(reading, _error(metric, reading, reference, inputs.get(metric.of), step, second)))
        for (metric, reading), reference in zip(readings, references, strict=True)
    ]


def confirmed(readings: Readings, single: Readings, confirmation: Confirmation) -> Readings:
    """Readings of doubled precision with float64's digits, marked where doubled precision does not know them either.

    Args:
        readings: Those of the doubled pass.
        single: The same of float64, marked by its own second pass. Where they are marked or differ, a second doubled
            pass decides, by the reading and by what it is read off.
        confirmation: The passes. Where doubled precision knows nothing (`Confirmation.lost`), readings are marked.
    """
    marked = []
    for (metric, reading), (_, reference) in zip(readings, single, strict=True):
        error = _doubled_error(metric, reading, confirmation.doubled, confirmation.single)
        unsure = (error > AGREED) | reference.below_floor
        if bool(unsure.any()):
            of_doubled = _doubled_error(metric, reading, confirmation.doubled, confirmation.perturbed)
            error = torch.where(unsure, of_doubled, error)
        error = error.masked_fill(confirmation.zeros.heads, torch.inf) if metric.of == "heads" else error
        error = error.masked_fill(_spread(confirmation.lost, error), torch.inf)
        digits = _digits(reading, difference(reading, reference))
        marked.append((metric, replace(_marked(reading, error), digits=digits)))
    return marked


def _doubled_error(metric: Metric, reading: Reading, step: DeviationStep, other: DeviationStep) -> Errors:
    """How far a reading of doubled precision, and all that it is read off, are from another pass's."""
    error = _error_against(metric, reading, step, other)
    if metric.of == "attention" and step.attention is not None and other.attention is not None:
        patterns = comparison.pattern_difference(step.attention, other.attention.matrix())
        error = torch.maximum(error, patterns.nan_to_num(nan=torch.inf))
    if metric.of != "tokens":
        return error.masked_fill(_cut(metric, reading, step), torch.inf)
    error = torch.maximum(error, _spread(comparison.state_distance(step.state, other.state), error))
    if metric.sensitive_to == "directions":
        error = torch.maximum(error, comparison.direction_difference(step.state, other.state))
    if metric.count:
        apart = comparison.state_distance(step.state, other.state, deep=False)
        error = error.masked_fill(_spread(_miscounted(metric, step.state, apart), error), torch.inf)
    return error


def _noise(state: State) -> float:
    """The distance of two states above which what is rounding may count as a singular value."""
    return NOISY * max(state.R.value.shape[1:])


def _miscounted(metric: Metric, state: State, distances: Errors) -> Tensor:
    """True where states of passes are so far apart that rounding may be counted: the count is another if its tolerance
    is `COUNTED` times that distance."""
    noisy, (state, _) = distances > _noise(state), state.finite
    X = state.scaled_tokens if metric.rule is None else state.residual.value  # what the metric is read off
    for sample in noisy.nonzero()[:, 0].tolist():
        at, unit = slice(sample, sample + 1), COUNTED * float(distances[sample].clamp(max=1.0))
        counts = [metric.compute(X[at], ~state.valid.mask[at], unit=tolerance) for tolerance in (UNIT, unit)]
        noisy[sample] = (counts[0] != counts[1]).any()
    return noisy


def _uncounted(metric: Metric, reading: Reading, state: State, second: SecondPassStep) -> Tensor:
    """True where a rank of the residual is less than it could be, and more in a perturbed pass, at a tolerance that the
    perturbation of its result alone does not reach: rounding may have hidden what is counted."""
    width, (_, broken) = state.R.value.shape[-1], state.finite
    less = reading.value < (state.valid.count[:, 0] - 1).clamp(max=width)
    if metric.rule is None or broken is not None or not bool(less.any()):
        return torch.zeros_like(less)
    residual = second.perturbed_for(less).state.residual.value
    return less & (metric.compute(residual, ~state.valid.mask, unit=PERTURBED * UNIT) > reading.value)


def _error(
    metric: Metric,
    reading: Reading,
    plain: Reading | None,
    inputs: Errors | None,
    step: DeviationStep,
    second: SecondPassStep,
) -> Errors:
    """The relative error of a reading, as far as a second pass can tell; `inputs` is that of what it is read off."""
    error = torch.full_like(reading.value, torch.nan)
    unsettled = torch.ones_like(reading.value, dtype=torch.bool)
    if plain is not None:
        error = difference(reading, plain)
        floor = plain.floor * _steepness(step) if metric.of in ("attention", "heads") else plain.floor
        settled = (reading.value - plain.value).abs() > BLIND * floor
        # Below, float64 does not see the sixth digit: it agrees by chance, since both count units in the last place.
        settled = settled | ((error <= AGREED) & (NEAR * plain.value.abs() > floor))
        unsettled = ~_spread(second.resolved, error) | ~settled
    if bool(unsettled.any()):
        perturbed = _error_against(metric, reading, step, second.perturbed_for(unsettled))
        if plain is not None and metric.of != "tokens" and bool((perturbed <= AGREED).any()):
            # What float64 is blind to beside what it sees may be a unit in the last place: asked twice.
            again = _error_against(metric, reading, step, second.perturbed_again_for(unsettled))
            perturbed = torch.maximum(perturbed, again)
        error = torch.where(unsettled, perturbed, error)
    error = _settled(error, lambda near: _error_against(metric, reading, step, second.alone_for(near)))
    error = error if inputs is None else torch.maximum(error, _spread(inputs, error))
    if metric.sensitive_to == "directions" and metric.of == "tokens":
        # Of a token that is short beside the others, rounding may have decided no more than its sign.
        error = torch.maximum(error, _states(comparison.direction_difference, step.state, second))
    if metric.count and metric.of == "tokens":  # what is rounding may count where it is above the tolerance
        distance = partial(comparison.state_distance, deep=False)
        distances = _states(distance, step.state, second, _noise(step.state))
        error = error.masked_fill(_spread(_miscounted(metric, step.state, distances), error), torch.inf)
        error = error.masked_fill(_uncounted(metric, reading, step.state, second), torch.inf)
    error = error.masked_fill(_cut(metric, reading, step), torch.inf)
    if metric.of in ("attention", "heads") and second.lost_heads is not None:
        # Of a pattern, rows that are equal in numbers alone are lost.
        zero = (reading.value == 0) & (reading.log10 == -torch.inf) & (metric.sensitive_to == "row differences")
        error = error.masked_fill(second.lost_heads & (zero | (metric.of == "heads")), torch.inf)
    return error.masked_fill(_spread(second.lost, error), torch.inf)


def _cut(metric: Metric, reading: Reading, step: DeviationStep) -> Tensor:
    """True for heads of which a reading may be due to a cut of scores: a pattern's that is next to nothing, or of
    outputs of a head whose rows are next to alike."""
    P, nothing = step.attention or step.rows, torch.zeros_like(reading.value, dtype=torch.bool)
    if P is None or metric.of not in ("attention", "heads"):
        return nothing
    cut = comparison.cut_heads(P)
    if not bool(cut.any()):
        return nothing
    if metric.of == "heads":
        return cut & comparison.alike_rows(P)
    return cut & reading.log10.isfinite() & (reading.log10 * math.log(10) < comparison.FAINT)


def _steepness(step: DeviationStep) -> Errors:
    """How many times its own rounding an attention weight has of its scores', by head."""
    P = step.attention or step.rows
    sizes = None if P is None else comparison.score_sizes(P)
    if sizes is None:
        return torch.ones((), dtype=torch.float64, device=step.state.x.log.device)
    ref, D = sizes
    return 1 + torch.maximum(ref, D.clamp(max=100.0).exp())


def _error_against(metric: Metric, reading: Reading, step: DeviationStep, perturbed: DeviationStep) -> Errors:
    """How far a reading, and what it is read off, are from a perturbed pass's."""
    reference = read(metric, perturbed)
    assert reference is not None
    return torch.maximum(difference(reading, reference), _input_distance(metric, step, perturbed))


def _input_distance(metric: Metric, step: DeviationStep, perturbed: DeviationStep) -> Errors:
    """How far what a reading below float64's sight is read off is from a perturbed pass's: numbers that are a
    unit in the last place or two are often the same by chance, matrices are not."""
    valid = step.state.valid
    if metric.of == "attention" and metric.sensitive_to == "row differences":
        if step.rows is not None and step.attention is None:
            assert perturbed.rows is not None
            return comparison.pattern_distance(step.rows, perturbed.rows)
        patterns = [P for P in (step.attention, perturbed.attention) if P is not None]
        pairs = [_row_differences(P, valid) for P in patterns]
    elif metric.of == "heads":
        pairs = [heads.contributions(valid) for heads in (step.heads, perturbed.heads) if heads is not None]
    else:
        pairs = []
    if len(pairs) < 2:
        return torch.zeros((), dtype=torch.float64, device=step.state.x.log.device)
    return comparison.state_distance(pairs[0], pairs[1]).view(len(valid.mask), -1)


def _row_differences(P: DeviationPattern, valid: ValidTokens) -> State:
    """What rows of P differ by, about their mean: the row that they are written about may be another."""
    rows = State.of_heads(P.by_head, valid)
    return replace(rows, R=rows.centred()[1])


def _compared(
    second: SecondPassStep,
    plain: Callable[[Step], Errors],
    perturbed: Callable[[DeviationStep], Errors],
    agreed: float = AGREED,
) -> Errors:
    """Errors against the plain second pass where float64 resolves a sample, else against the perturbed; above `agreed`
    and within `NEAR` against a third pass."""
    if second.plain is None:
        errors = perturbed(second.perturbed_for(~second.resolved))
    else:
        errors = plain(second.plain)
        if not bool(second.resolved.all()):
            errors_of_perturbed = perturbed(second.perturbed_for(~second.resolved))
            errors = torch.where(_spread(second.resolved, errors), errors, errors_of_perturbed)
    return _settled(errors, lambda near: perturbed(second.alone_for(near)), agreed)


def _settled(errors: Errors, against_third: Callable[[Tensor], Errors], agreed: float = AGREED) -> Errors:
    """Errors, by a third pass where they are within `NEAR` of agreement; it is asked for which samples (and heads)."""
    near = (errors > agreed) & (errors <= NEAR)
    return torch.where(near, against_third(near), errors) if bool(near.any()) else errors


def _states(
    distance: Callable[[State, State], Errors], state: State, second: SecondPassStep, agreed: float = AGREED
) -> Errors:
    """How far the states of the two passes are apart, by one of the distances of `deviation/comparison.py`."""
    return _compared(
        second,
        lambda plain: distance(state, State.of(plain.state, state.valid.mask)),
        lambda perturbed: distance(state, perturbed.state),
        agreed,
    )


def _patterns(step: DeviationStep, second: SecondPassStep) -> Errors | None:
    """The largest difference of an attention weight, by head: matrices with nothing in common may read the same."""
    P = step.rows or step.attention
    if P is None:
        return None

    def of_plain(plain: Step) -> Errors:
        pattern = second.plain_rows if isinstance(second, SecondPassLayer) and step.rows else plain.attention
        assert pattern is not None
        return comparison.pattern_difference(P, pattern)

    def of_perturbed(perturbed: DeviationStep) -> Errors:
        Q = perturbed.rows or perturbed.attention
        assert Q is not None
        return comparison.pattern_difference(P, Q.matrix() if isinstance(Q, DeviationPattern) else Q.matrix)

    return _compared(second, of_plain, of_perturbed).nan_to_num(nan=torch.inf)


def difference(reading: Reading, reference: Reading) -> Errors:
    """`|a - b| / |a|`, at any scale; 0 where both are zero or neither is a number. Of logs beyond 1000, their
    difference as a share of a thousandth of them."""
    logs = (reading.log10 - reference.log10).abs() * math.log(10) / (reading.log10.abs() / 1e3).clamp(min=1.0)
    same = (reading.log10 == reference.log10) | (reading.log10.isnan() & reference.log10.isnan())
    logs = logs.masked_fill(same, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return logs.masked_fill(reading.value * reference.value < 0, torch.inf)


def _marked(reading: Reading, error: Errors) -> Reading:
    value = reading.value.abs().clamp(min=SMALLEST)
    floor = torch.where(error > AGREED, torch.maximum(reading.floor, value), reading.floor)
    return replace(reading, floor=floor, digits=_digits(reading, error))


def _digits(reading: Reading, error: Errors) -> Errors:
    return -error.clamp(1e-16, 1.0).log10().masked_fill(reading.value.isnan(), torch.nan)


def _spread(per_sample: Tensor, like: Tensor) -> Tensor:
    return spread(per_sample, like).expand_as(like)

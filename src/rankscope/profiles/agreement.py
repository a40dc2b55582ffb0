"""Compares the readings of two passes, and marks those that rounding decided.

Called by `readers.py` for each layer: `checked` and `checked_floats` where a second pass ran beside the first
(`check=True`), `confirmed` where doubled precision did. Each estimates the relative error that rounding caused in every
reading, writes it as `digits`, and marks readings whose error is above `AGREED`.

- `checked_floats`: the first pass ran in float64, the second in float32. Their difference times `ROUNDING` is the error
  (`deviation/second_pass.py`).
- `checked`: both passes ran in deviation arithmetic, the second perturbed `EXAGGERATED` times as much as usual.
  Their difference divided by that is the error.

Two readings may agree by chance. So the largest difference counts, of a reading and of what it is read off: tokens,
patterns, and what else a metric is `sensitive_to`.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rankscope.deviation import (
    EXAGGERATED,
    ROUNDING,
    Confirmation,
    DeviationPattern,
    DeviationSecondPass,
    DeviationStep,
    FloatLayer,
    PatternByRows,
    State,
    comparison,
    piecewise,
    read,
    spread,
)
from rankscope.metrics import SMALLEST, UNIT, Metric, Of, Reading, Readings
from rankscope.nets import Transformer, contributions
from rankscope.shapes import Float

AGREED = 1e-9  # the largest relative error of a reading that is not marked
NOISY = 100 * torch.finfo(torch.float64).eps
"""The distance of two passes, for each token or width, above which counts are taken again at a tolerance of it."""
COUNTED = 100.0  # how many times the distance of two passes a singular value must be to be no rounding
PERTURBED = 8.0  # the tolerances of a count up to which a perturbed residual may have singular values of that alone

Errors = Float[Tensor, "..."]
ByDeviation = Callable[[Metric], tuple[DeviationStep, DeviationSecondPass]]


def checked(readings: Readings, step: DeviationStep, second: DeviationSecondPass) -> Readings:
    """Readings of deviation arithmetic with their digits, marked where the second pass differs."""
    apart, marked = _apart_from(step, second.step, EXAGGERATED), []
    for metric, reading in readings:
        error = apart(metric, reading)
        if metric.count and metric.of == "tokens":
            error = error.masked_fill(_uncounted(metric, reading, step.state, second), torch.inf)
        if metric.of in ("attention", "heads") and second.lost_heads is not None:
            # Of a pattern, rows that are equal in numbers alone are lost.
            zero = (reading.value == 0) & (reading.log10 == -torch.inf) & (metric.sensitive_to == "row differences")
            error = error.masked_fill(second.lost_heads & (zero | (metric.of == "heads")), torch.inf)
        marked.append((metric, _marked(reading, error.masked_fill(_spread(second.lost, error), torch.inf))))
    return marked


def checked_floats(
    readings: Readings, narrow: Readings, layer: FloatLayer, net: Transformer, by_deviation: ByDeviation
) -> Readings:
    """Readings of float64 with their digits, by those of the pass in float32 (`narrow`) and by the tokens and patterns
    of both passes (`layer`). Those with an error above `AGREED` are replaced by deviation arithmetic's: `by_deviation`
    runs as much of the layer as a metric needs in both of its passes."""
    result = []
    for (metric, reading), (_, of_narrow) in zip(readings, narrow, strict=True):
        error = ROUNDING * torch.maximum(difference(reading, of_narrow), _change(metric, reading, layer, net))
        if metric.rule is not None:
            # What both passes are blind to, as the 1e-20 that a weight of attention lacks of one, is at most the floor.
            # Of zeros nothing is known but of a single token, which differs from none.
            exact_zero = (reading.value == 0) & _spread(layer.valid.sum(-1) <= 1, error) & (metric.of == "tokens")
            blind = (reading.floor / reading.value.abs()).nan_to_num(nan=torch.inf)
            error = torch.maximum(error, blind).masked_fill(exact_zero, 0.0)
            reading = replace(reading, floor=torch.zeros_like(reading.floor))

        def exact(metric: Metric = metric) -> Reading:
            step, second = by_deviation(metric)
            by_rule = read(metric, step)
            assert by_rule is not None
            return checked([(metric, by_rule)], step, second)[0][1]

        reading = replace(reading, digits=_digits(reading, error))
        result.append((metric, piecewise("agreement.unsure", error > AGREED, exact, reading)))
    return result


def _change(metric: Metric, reading: Reading, layer: FloatLayer, net: Transformer) -> Errors:
    """How far what a metric is read off is apart in float32 and float64; infinite where that is not known."""
    a, b = layer.step, layer.narrow
    if metric.count:  # a singular value is counted at a tolerance of float64's
        return torch.full_like(reading.value, torch.inf)
    if metric.of == "tokens":
        change = layer.distance
        if metric.sensitive_to == "directions":
            change = torch.maximum(change, comparison.direction_difference(a.state, b.state.to(a.state.dtype)))
        return change
    if metric.of == "attention":
        rows_differ = metric.sensitive_to == "row differences"
        if not isinstance(a.attention, Tensor) or not isinstance(b.attention, Tensor):
            return _change_of_rows(metric, reading, layer, rows_differ)
        valid = layer.valid[:, None].expand(a.attention.shape[:3])
        if rows_differ:
            return comparison.relative_change(a.attention, b.attention, valid)
        return (b.attention.to(a.attention.dtype) - a.attention).abs().amax((-2, -1)).nan_to_num(nan=torch.inf)
    if metric.of == "heads" and a.heads is not None and b.heads is not None:
        added = contributions(net.weights.layers[a.layer - 1], a.heads)
        of_narrow = contributions(net.weights.layers[a.layer - 1], b.heads.to(a.heads.dtype))
        return comparison.relative_change(added, of_narrow, layer.valid[:, None].expand(added.shape[:3]))
    assert a.routing is not None and b.routing is not None
    return (b.routing.to(a.routing.dtype) - a.routing).abs().amax((-2, -1)).nan_to_num(nan=torch.inf)


def _change_of_rows(metric: Metric, reading: Reading, layer: FloatLayer, rows_differ: bool) -> Errors:
    """`_change` for attention by rows: of the number of each row; not known for metrics of what rows differ by."""
    both: tuple[Any, Any] = layer.step.attention, layer.narrow.attention  # `PatternNumbers`
    numbers, narrow = (of_pass.of_rows.get(metric.name) for of_pass in both)
    if rows_differ or numbers is None or narrow is None:
        return torch.full_like(reading.value, torch.inf)
    valid = layer.valid[:, None]
    size = numbers.abs().masked_fill(~valid, 0.0).amax(-1)
    apart = (numbers - narrow).abs().masked_fill(~valid, 0.0).amax(-1)
    return (apart / size.masked_fill(size == 0, 1.0)).nan_to_num(nan=torch.inf)


def confirmed(readings: Readings, single: Readings, confirmation: Confirmation) -> Readings:
    """Readings of doubled precision with float64's digits, marked where doubled precision does not know them either.

    `single` are the same of float64, marked by its own second pass. Where they are marked or differ, a second doubled
    pass of the `confirmation` decides, by the reading and by what it is read off; where doubled precision knows nothing
    (`Confirmation.lost`), readings are marked.
    """
    by_single, marked = _apart_from(confirmation.doubled, confirmation.single), []
    for (metric, reading), (_, reference) in zip(readings, single, strict=True):
        error = by_single(metric, reading)
        unsure = (error > AGREED) | reference.below_floor
        if bool(unsure.any()):
            by_perturbed = _apart_from(confirmation.doubled, confirmation.perturbed)
            error = torch.where(unsure, by_perturbed(metric, reading), error)
        error = error.masked_fill(confirmation.zeros.heads, torch.inf) if metric.of == "heads" else error
        error = error.masked_fill(_spread(confirmation.lost, error), torch.inf)
        digits = _digits(reading, difference(reading, reference))
        marked.append((metric, replace(_marked(reading, error), digits=digits)))
    return marked


def _apart_from(step: DeviationStep, other: DeviationStep, times: int = 1) -> Callable[[Metric, Reading], Errors]:
    """Tells how far a reading, and all that it is read off, are from those of another pass, rounded so many times as
    much as usual."""

    @cache
    def inputs(of: Of) -> Errors | None:
        """What metrics are read off: tokens by sample, patterns by head, which may read the same by chance."""
        if of == "tokens":
            return comparison.state_distance(step.state, other.state) / times
        P, Q = step.attention, other.attention
        if of != "attention" or P is None or Q is None:
            return None
        return comparison.pattern_difference(P, Q).nan_to_num(nan=torch.inf) / times

    def apart(metric: Metric, reading: Reading) -> Errors:
        reference, of_inputs = read(metric, other), inputs(metric.of)
        assert reference is not None
        error = torch.maximum(difference(reading, reference), _input_distance(metric, step, other)) / times
        error = error if of_inputs is None else torch.maximum(error, _spread(of_inputs, error))
        if metric.sensitive_to == "directions" and metric.of == "tokens":
            # Of a token that is short beside the others, rounding may have decided no more than its sign.
            tokens = (state.scaled_tokens for state in (step.state, other.state))
            error = torch.maximum(error, comparison.direction_difference(*tokens) / times)
        if metric.count and metric.of == "tokens":  # what is rounding may count where it is above the tolerance
            distances = comparison.state_distance(step.state, other.state, deep=False) / times
            error = error.masked_fill(_spread(_miscounted(metric, step.state, distances), error), torch.inf)
        return error.masked_fill(_cut(metric, reading, step), torch.inf)

    return apart


def _miscounted(metric: Metric, state: State, distances: Errors) -> Tensor:
    """True where states of passes are so far apart that rounding may be counted: the count is another if its tolerance
    is `COUNTED` times that distance."""
    noisy, (state, _) = distances > NOISY * max(state.R.value.shape[1:]), state.finite
    X = state.scaled_tokens if metric.rule is None else state.residual.value  # what the metric is read off
    for sample in noisy.nonzero()[:, 0].tolist():
        at, unit = slice(sample, sample + 1), COUNTED * float(distances[sample].clamp(max=1.0))
        counts = [metric.compute(X[at], ~state.valid.mask[at], unit=tolerance) for tolerance in (UNIT, unit)]
        noisy[sample] = (counts[0] != counts[1]).any()
    return noisy


def _uncounted(metric: Metric, reading: Reading, state: State, second: DeviationSecondPass) -> Tensor:
    """True where a rank of the residual is less than it could be, and more in a perturbed pass, at a tolerance that the
    perturbation of its result alone does not reach: rounding may have hidden what is counted."""
    width, (_, broken) = state.R.value.shape[-1], state.finite
    less = reading.value < (state.valid.count[:, 0] - 1).clamp(max=width)
    if metric.rule is None or broken is not None:
        return torch.zeros_like(less)

    def more() -> Tensor:
        residual, unit = second.step.state.residual.value, PERTURBED * EXAGGERATED * UNIT
        return metric.compute(residual, ~state.valid.mask, unit=unit) > reading.value

    return piecewise("agreement.fewer", less, more, torch.zeros_like(less))


def _cut(metric: Metric, reading: Reading, step: DeviationStep) -> Tensor:
    """True for heads of which a reading may be due to a cut of scores: a pattern's that is next to nothing, or of
    outputs of a head whose rows are next to alike."""
    P, nothing = step.attention, torch.zeros_like(reading.value, dtype=torch.bool)
    if P is None or metric.of not in ("attention", "heads"):
        return nothing
    cut = comparison.cut_heads(P)

    def next_to_nothing() -> Tensor:
        if metric.of == "heads":
            return comparison.alike_rows(P)
        return reading.log10.isfinite() & (reading.log10 * math.log(10) < comparison.FAINT)

    return piecewise("agreement.cut", cut, next_to_nothing, nothing)


def _input_distance(metric: Metric, step: DeviationStep, perturbed: DeviationStep) -> Errors:
    """How far what a reading below float64's sight is read off is from a perturbed pass's: numbers that are a
    unit in the last place or two are often the same by chance, matrices are not."""
    valid = step.state.valid
    if metric.of == "attention" and metric.sensitive_to == "row differences":
        P, Q = step.attention, perturbed.attention
        if isinstance(P, PatternByRows) and isinstance(Q, PatternByRows):
            return comparison.pattern_distance(P, Q)
        rows = [State.of_heads(P.by_head, valid) for P in (P, Q) if isinstance(P, DeviationPattern)]
        pairs = [replace(each, R=each.centred()[1]) for each in rows]  # about their mean: p may be another row
    elif metric.of == "heads":
        pairs = [heads.contributions(valid) for heads in (step.heads, perturbed.heads) if heads is not None]
    else:
        pairs = []
    if len(pairs) < 2:
        return torch.zeros((), dtype=torch.float64, device=step.state.x.log.device)
    return comparison.state_distance(pairs[0], pairs[1]).view(len(valid.mask), -1)


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
    """The digits that are right. Rounding up to the floor, which a metric without a rule has, may be the same in both
    passes."""
    blind = (reading.floor / reading.value.abs()).nan_to_num(nan=0.0)
    return -torch.maximum(error, blind).clamp(1e-16, 1.0).log10().masked_fill(reading.value.isnan(), torch.nan)


def _spread(per_sample: Tensor, like: Tensor) -> Tensor:
    return spread(per_sample, like).expand_as(like)

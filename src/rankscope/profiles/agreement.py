"""Whether a second pass agrees with the first, reading by reading.

A reading holds to as many digits as two passes that rounded otherwise agree on. The second is float64's where
it can see (`deviation/second_pass.py`): what it contradicts is marked, unless the two differ by less than
float64's own floor; then, and where float64 cannot see, deviation arithmetic is asked again, shaken.
"""

import math
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from rankscope.deviation import DeviationStep, State
from rankscope.deviation.attention import DeviationPattern
from rankscope.deviation.comparison import (
    direction_difference,
    pattern_difference,
    pattern_distance,
    score_sizes,
    state_distance,
)
from rankscope.deviation.confirm import Confirmation
from rankscope.deviation.readings import read
from rankscope.deviation.second_pass import SecondPassLayer
from rankscope.deviation.state import ValidTokens
from rankscope.metrics import Metric, Reading
from rankscope.metrics.log_readings import SMALLEST
from rankscope.nets import Step
from rankscope.nets.streaming import Numbers
from rankscope.profiles.rows import Found
from rankscope.shapes import Float

AGREED = 1e-9
"""Relative difference up to which two passes agree."""
NOISY = 100 * torch.finfo(torch.float64).eps
"""The share of rounding, for each token or width, above which singular values are not counted."""
BLIND = 1e3
"""Float64's floors, up to which a difference from float64 says nothing."""

Errors = Float[Tensor, "..."]


@runtime_checkable
class Second(Protocol):
    """The second pass of one layer (`SecondPassLayer`), or of several side by side (`together.py`)."""

    @property
    def resolved(self) -> Tensor:
        """Of which samples float64 can see what the tokens differ by."""

    @property
    def lost(self) -> Tensor:
        """Of which samples nothing is known."""

    @property
    def before(self) -> State:
        """Its tokens before the layer, or before one of them."""

    @property
    def plain(self) -> Step | None:
        """By plain rules; None where float64 sees no sample."""

    @property
    def restored_numbers(self) -> Numbers | None:
        """Of attention by plain rules, where it is by rows."""

    def perturbed_for(self, where: Tensor) -> DeviationStep:
        """By shaken rules of deviation arithmetic, for the samples for which that is asked."""

    def perturbed_again_for(self, where: Tensor) -> DeviationStep:
        """The same, shaken otherwise."""


def checked(found: Found, plain: Found | None, step: DeviationStep, seen: Second) -> Found:
    """Readings with their digits, and marked where a second pass does not agree. `plain` are the witness's by
    plain rules, where it took them."""
    states = _states(step.state, seen)
    weights = _weights(step, seen) if any(each.of == "attention" for each, _ in found) else None
    others = [None] * len(found) if plain is None else [reading for _, reading in plain]
    apart = {"tokens": states, "attention": weights, "heads": None, "routing": None}
    return [
        (each, _marked(reading, _error(each, reading, other, apart[each.of], step, seen)))
        for (each, reading), other in zip(found, others, strict=True)
    ]


def confirmed(found: Found, single: Found, here: Confirmation) -> Found:
    """Readings of doubled precision, with the digits that float64's have of them; marked where neither
    float64 nor a second doubled pass agrees."""
    states = state_distance(here.doubled.state, here.single.state)
    if bool((states > AGREED).any()):
        states = torch.where(
            states > AGREED, state_distance(here.doubled.state, here.perturbed.state), states
        )
    done = []
    for (each, reading), (_, other) in zip(found, single, strict=True):
        agreed = difference(reading, other)
        error = agreed
        if bool((error > AGREED).any()):
            again = read(each, here.perturbed)
            assert again is not None
            error = torch.where(error > AGREED, difference(reading, again), error)
        error = torch.maximum(error, _spread(states, error)) if each.of == "tokens" else error
        error = error.masked_fill(_spread(here.lost, error), torch.inf)
        done.append((each, replace(_marked(reading, error), digits=_digits(reading, agreed))))
    return done


def _error(
    each: Metric, one: Reading, plain: Reading | None, apart: Errors | None, step: DeviationStep, seen: Second
) -> Errors:
    """The relative error of a reading, as far as a second pass can tell; `apart` is how far what it is read
    off is from the second pass's."""
    error = torch.full_like(one.value, torch.nan)
    again = torch.ones_like(one.value, dtype=torch.bool)
    if plain is not None:
        error = difference(one, plain)
        floor = plain.floor * _steepness(step) if each.of in ("attention", "heads") else plain.floor
        told = (one.value - plain.value).abs() > BLIND * floor
        told = told | ((error <= AGREED) & (plain.value.abs() > BLIND * floor))
        again = ~_spread(seen.resolved, error) | ~told
    if bool(again.any()):
        found = _against(each, one, step, seen.perturbed_for(again))
        if plain is not None and each.of != "tokens" and bool((found <= AGREED).any()):
            # What float64 is blind to beside what it sees may be a unit in the last place: asked twice.
            found = torch.maximum(found, _against(each, one, step, seen.perturbed_again_for(again)))
        error = torch.where(again, found, error)
    error = error if apart is None else torch.maximum(error, _spread(apart, error))
    if each.sensitive_to == "directions" and each.of == "tokens":
        error = torch.maximum(error, _turned(step.state, seen))
    if each.count and each.of == "tokens":  # what is rounding may count where it is above the tolerance
        noisy = _states(step.state, seen, deep=False) > NOISY * max(seen.before.R.value.shape[1:])
        error = error.masked_fill(_spread(noisy, error), torch.inf)
    return error.masked_fill(_spread(seen.lost, error), torch.inf)


def _steepness(step: DeviationStep) -> Errors:
    """How many times its own rounding an attention weight has of its scores', by head."""
    P = step.attention or step.rows
    sizes = None if P is None else score_sizes(P)
    if sizes is None:
        return torch.ones((), dtype=torch.float64, device=step.state.x.log.device)
    ref, D = sizes
    return 1 + torch.maximum(ref, D.clamp(max=100.0).exp())


def _against(each: Metric, one: Reading, step: DeviationStep, other: DeviationStep) -> Errors:
    """How far a reading, and what it is read off, are from another pass's."""
    found = read(each, other)
    assert found is not None
    return torch.maximum(difference(one, found), _inside(each, step, other))


def _inside(each: Metric, step: DeviationStep, another: DeviationStep) -> Errors:
    """How far what a reading below float64's sight is read off is from another pass's: numbers that are a
    unit in the last place or two are often the same by chance, matrices are not."""
    one, other = step.attention, another.attention
    differences = each.of == "attention" and each.sensitive_to == "row differences"
    if differences and one is not None and other is not None:
        rows = [_differences(P, step.state.valid) for P in (one, other)]
    elif differences and step.rows is not None:
        assert another.rows is not None
        return pattern_distance(step.rows, another.rows)
    elif each.of == "heads" and step.heads is not None and another.heads is not None:
        rows = [spoken.contributions(step.state.valid) for spoken in (step.heads, another.heads)]
    else:
        return torch.zeros((), dtype=torch.float64, device=step.state.x.log.device)
    return state_distance(rows[0], rows[1]).view(len(step.state.valid.mask), -1)


def _differences(P: DeviationPattern, valid: ValidTokens) -> State:
    """What rows of P differ by, about their mean: the row that they are written about may be another."""
    rows = State.of_heads(P.by_head, valid)
    return replace(rows, R=rows.centred()[1])


def _turned(state: State, seen: Second) -> Errors:
    """The largest difference of a token's direction: of one that is short beside the others, rounding may
    have decided no more than its sign."""
    if seen.plain is None:
        return direction_difference(state, seen.perturbed_for(~seen.resolved).state)
    found = direction_difference(state, State.of(seen.plain.state, state.valid.mask))
    if bool(seen.resolved.all()):
        return found
    return torch.where(
        seen.resolved, found, direction_difference(state, seen.perturbed_for(~seen.resolved).state)
    )


def _states(state: State, seen: Second, deep: bool = True) -> Errors:
    """How far the deviations of the two passes are apart."""
    if seen.plain is None:
        return state_distance(state, seen.perturbed_for(~seen.resolved).state, deep)
    apart = state_distance(state, State.of(seen.plain.state, state.valid.mask), deep)
    if bool(seen.resolved.all()):
        return apart
    return torch.where(
        seen.resolved, apart, state_distance(state, seen.perturbed_for(~seen.resolved).state, deep)
    )


def _weights(step: DeviationStep, seen: Second) -> Errors | None:
    """The largest difference of an attention weight, by head: of whole matrices, since what is read off two
    that have nothing in common can be the same."""
    if step.rows is not None:
        assert isinstance(seen, SecondPassLayer)
        found = None if seen.plain_step is None else pattern_difference(step.rows, seen.plain_rows)
        if found is None or not bool(seen.resolved.all()):
            assert seen.perturbed.rows is not None
            shaken = pattern_difference(step.rows, seen.perturbed.rows.matrix)
            found = shaken if found is None else torch.where(_spread(seen.resolved, found), found, shaken)
        return found.nan_to_num(nan=torch.inf)
    if step.attention is None:
        return None
    P = step.attention.matrix()
    plain = None if seen.plain is None else seen.plain.attention
    if plain is None or not bool(seen.resolved.all()):
        again = seen.perturbed_for(~seen.resolved).attention
        assert again is not None
        fine = again.matrix()
        plain = fine if plain is None else torch.where(_spread(seen.resolved, P), plain, fine)
    return (P - plain).abs().amax((-2, -1)).nan_to_num(nan=torch.inf)


def difference(one: Reading, other: Reading) -> Errors:
    """`|a - b| / |a|`, at any scale; 0 where both are zero or neither is a number. Of logs beyond 1000, their
    difference as a share of a thousandth of them."""
    logs = (one.log10 - other.log10).abs() * math.log(10) / (one.log10.abs() / 1e3).clamp(min=1.0)
    same = (one.log10 == other.log10) | (one.log10.isnan() & other.log10.isnan())
    logs = logs.masked_fill(same, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return logs.masked_fill(one.value * other.value < 0, torch.inf)


def _marked(reading: Reading, error: Errors) -> Reading:
    value = reading.value.abs().clamp(min=SMALLEST)
    floor = torch.where(error > AGREED, torch.maximum(reading.floor, value), reading.floor)
    return replace(reading, floor=floor, digits=_digits(reading, error))


def _digits(reading: Reading, error: Errors) -> Errors:
    return -error.clamp(1e-16, 1.0).log10().masked_fill(reading.value.isnan(), torch.nan)


def _spread(per_sample: Tensor, like: Tensor) -> Tensor:
    return per_sample.reshape(*per_sample.shape, *[1] * (like.ndim - per_sample.ndim)).expand_as(like)

"""The axis of powers: every finite log10 has a place, in order."""

import math
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from rankscope.figures import DEEP
from rankscope.figures.powers import Powers

LOGS = st.lists(st.floats(-1e6, 1e6, allow_nan=False), min_size=2, max_size=20)


@given(LOGS)
def test_places_keep_the_order(logs: list[float]) -> None:
    axis = Powers(logs)
    ordered = sorted(logs)
    places = axis.place(ordered)
    assert all(place is not None for place in places)
    assert places == sorted(places, key=lambda place: place or 0.0)
    low, high = axis.range
    assert low < (places[0] or 0.0) and (places[-1] or 0.0) < high


@given(LOGS)
@example([3.0, 6.0])
@example([5.1, 7.9])
@example([-5.2, -4.9])
def test_labels_stand_where_their_numbers_do(logs: list[float]) -> None:
    axis = Powers(logs)
    assert len(axis.ticks) >= 1
    for tick, place in zip(axis.ticks, axis.place(axis.ticks), strict=True):
        digits, caret, exponent = axis.label(tick).rpartition("10^")
        k = float(exponent) if caret else math.log10(float(exponent))
        k += math.log10(float(digits.removesuffix("·"))) if digits else 0.0
        assert math.isclose(axis.place([k])[0] or 0.0, place or 0.0, rel_tol=2e-2, abs_tol=2e-2)


@given(st.floats(2, 290))
def test_labels_are_few_and_short_at_any_depth(depth: float) -> None:
    axis = Powers([0.0, -(10.0**depth)])
    labels = list(map(axis.label, axis.ticks))
    assert 4 <= len(labels) <= 14 and max(map(len, labels)) <= len("10^-1000000")
    assert len(set(labels)) == len(labels)
    assert math.isclose(float(labels[0].removeprefix("10^")), axis.ticks[0], rel_tol=1e-9)
    low, high = axis.limits
    assert low < axis.low and high > axis.high


def test_zero_and_nothing_have_no_place() -> None:
    axis = Powers([0.0, -3.0])
    assert axis.place([-math.inf, math.nan, -2.0]) == [None, None, -2.0]
    assert not axis.deep and Powers([0.0, -DEEP - 1]).deep


def test_a_doubly_exponential_fall_is_a_straight_line() -> None:
    logs = [-(3.0**layer) for layer in range(2, 13)]
    places = [place or 0.0 for place in Powers([0.0, *logs]).place(logs)]
    steps = [b - a for a, b in pairwise(places)]
    assert all(math.isclose(step, -math.log10(3), rel_tol=1e-12) for step in steps)


def test_labels_of_a_very_deep_axis_are_few_and_short() -> None:
    axis = Powers([0.0, -2e19])
    labels = list(map(axis.label, axis.ticks))
    assert 4 <= len(labels) <= 12 and max(map(len, labels)) < len("10^-100000")
    assert "10^-1e6" in labels


def test_a_deep_axis_has_labels_up_to_its_ends() -> None:
    """From the exponent 0 to 100 on one side: 1, 10 and 100, between them 3 times the tens, and 0 itself."""
    for sign in (1, -1):
        ticks = Powers([0.0, sign * 100.0]).ticks
        assert sorted(sign * k for k in ticks if 0 <= sign * k <= 100) == [0.0, 1.0, 10.0, 30.0, 100.0]

"""The axis of powers: every finite log10 has a place, in order."""

import math
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from rankscope.charts.powers import DEEP, Powers

LOGS = st.lists(st.floats(-1e6, 1e6, allow_nan=False), min_size=2, max_size=20)


@given(LOGS)
def test_places_keep_the_order(logs: list[float]) -> None:
    axis = Powers(logs)
    ordered = sorted(logs)
    places = axis.place(ordered)
    assert all(place is not None for place in places)
    assert places == sorted(places, key=lambda place: place or 0.0)
    low, high = axis.axis("")["range"]
    assert low < (places[0] or 0.0) and (places[-1] or 0.0) < high


@given(LOGS)
@example([3.0, 6.0])
@example([5.1, 7.9])
@example([-5.2, -4.9])
def test_labels_stand_where_their_numbers_do(logs: list[float]) -> None:
    axis = Powers(logs)
    drawn = axis.axis("")
    assert len(drawn["tickvals"]) >= 1
    for place, label in zip(drawn["tickvals"], drawn["ticktext"], strict=True):
        digits, times, power = label.rpartition("10<sup>")
        if power.endswith("</sup>"):
            k = float(power.removesuffix("</sup>").replace("−", "-"))
            k += math.log10(float(digits.removesuffix("·"))) if digits else 0.0
        else:
            assert not times
            k = math.log10(float(label))
        assert math.isclose(axis.place([k])[0] or 0.0, place, rel_tol=2e-2, abs_tol=2e-2)


@given(st.floats(2, 290))
def test_labels_are_few_and_short_at_any_depth(depth: float) -> None:
    drawn = Powers([0.0, -(10.0**depth)]).axis("")
    assert 4 <= len(drawn["ticktext"]) <= 14
    assert max(len(label) for label in drawn["ticktext"]) <= len("10<sup>−1000000</sup>")
    assert len(set(drawn["ticktext"])) == len(drawn["tickvals"])
    far = drawn["ticktext"][0].removeprefix("10<sup>").removesuffix("</sup>").replace("−", "-")
    assert math.isclose(-1 - math.log10(-float(far)), drawn["tickvals"][0], rel_tol=1e-9)


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
    axis = Powers([0.0, -2e19]).axis("")
    assert 4 <= len(axis["ticktext"]) <= 12
    assert max(map(len, axis["ticktext"])) < len("10<sup>−100000</sup>")
    assert "10<sup>−1e6</sup>" in axis["ticktext"]

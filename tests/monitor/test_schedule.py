"""A step is due if the counter reaches or passes a multiple of `every`; those of a steady loop are all recorded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.errors import MonitorError
from rankscope.monitor.instrument import STRIDES, Schedule
from tests.raising import raises


@given(st.integers(1, 12), st.lists(st.integers(1, 30), min_size=1, max_size=40))
def test_a_step_is_due_if_a_multiple_lies_between_it_and_the_last(every: int, strides: list[int]) -> None:
    schedule, last = Schedule(0), 0
    for stride in strides:
        recorded = schedule.may_cross(every)
        schedule.advance(last + stride)
        due = any(step % every == 0 for step in range(last + 1, last + stride + 1))
        assert schedule.crossed(every) is due
        if due and stride <= max([*schedule.strides][:-1], default=every):
            assert recorded
        last += stride
    assert schedule.step == sum(strides) and len(schedule.strides) <= STRIDES


@pytest.mark.parametrize(
    ("stride", "every", "due"),
    [(1, 10, [10, 20, 30, 40]), (10, 10, [10, 20, 30, 40]), (4, 10, [12, 20, 32, 40]), (20, 10, [20, 40])],
)
def test_every_due_step_of_a_steady_loop_is_recorded(stride: int, every: int, due: list[int]) -> None:
    schedule = Schedule(0)
    recorded, measured = [], []
    for step in range(stride, 41, stride):
        if schedule.may_cross(every):
            recorded.append(step)
        schedule.advance(step)
        if schedule.crossed(every):
            measured.append(step)
    assert measured == due and set(recorded) - {stride} <= set(due) <= set(recorded)


def test_a_counter_that_starts_on_a_multiple_is_due_there() -> None:
    assert Schedule(0).crossed(10) and Schedule(20).crossed(10) and not Schedule(21).crossed(10)


def test_steps_that_do_not_grow_are_refused() -> None:
    schedule = Schedule(3)
    with raises(MonitorError, subject="step"):
        schedule.advance(3)
    assert schedule.step == 3

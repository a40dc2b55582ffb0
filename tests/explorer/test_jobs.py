"""One computation at a time, and only while someone waits for it."""

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rankscope.errors import BusyError, LateError
from rankscope.explorer.jobs import Cancelled, Interruptible, Job, Jobs

LONG = 60.0


class Endless:
    """Work that goes on for as long as it may, in torch operations that tell nobody."""

    def __init__(self) -> None:
        self.begun, self.left = threading.Event(), threading.Event()

    def __call__(self, job: Job) -> Iterator[Any]:
        yield "begun"
        try:
            with Interruptible(job.check):
                x = torch.ones(4)
                self.begun.set()
                while True:
                    x = x * 1.0
        finally:
            self.left.set()


def ended(given: "queue.Queue[Any]") -> Any:
    """What came last: parts before it are passed over."""
    while True:
        item = given.get(timeout=LONG)
        if item is None or isinstance(item, Exception):
            return item


def test_parts_come_in_order_and_then_the_end() -> None:
    given: queue.Queue[Any] = queue.Queue()
    jobs = Jobs()
    jobs.start("a", lambda _: iter([1, 2]), given.put)
    assert [given.get(timeout=LONG) for _ in range(3)] == [1, 2, None]
    jobs.close()


def test_a_newer_request_of_the_same_visitor_stops_the_older() -> None:
    jobs, work = Jobs(), Endless()
    older, newer = queue.Queue[Any](), queue.Queue[Any]()
    job = jobs.start("a", work, older.put)
    assert work.begun.wait(LONG)
    jobs.start("a", lambda _: iter([work.left.is_set() and job.ended.is_set()]), newer.put)
    assert newer.get(timeout=LONG) is True  # the newer did not run before the older had stopped
    assert job.cancelled and ended(older) is None
    jobs.close()


def test_another_visitor_waits_and_is_not_called_off() -> None:
    jobs, work = Jobs(), Endless()
    first = jobs.start("a", work, lambda _: None)
    assert work.begun.wait(LONG)
    given: queue.Queue[Any] = queue.Queue()
    jobs.start("b", lambda _: iter([first.ended.is_set()]), given.put)
    assert not first.cancelled
    first.cancel()
    assert given.get(timeout=LONG) is True
    jobs.close()


def test_more_than_may_wait_are_sent_away_with_a_sentence() -> None:
    jobs, work = Jobs(waiting=2), Endless()
    jobs.start("running", work, lambda _: None)
    assert work.begun.wait(LONG)
    for name in ("b", "c"):
        jobs.start(name, lambda _: iter([]), lambda _: None)
    with pytest.raises(BusyError, match="at most 2 requests wait"):
        jobs.start("d", lambda _: iter([]), lambda _: None)
    jobs.start("b", lambda _: iter([]), lambda _: None)  # in its own place
    jobs.close()


def test_what_takes_too_long_ends_with_a_sentence() -> None:
    jobs = Jobs(seconds=0.05)
    given: queue.Queue[Any] = queue.Queue()
    jobs.start("a", Endless(), given.put)
    assert isinstance(ended(given), LateError)
    jobs.close()


def test_an_error_is_handed_on_and_the_next_goes_on() -> None:
    jobs = Jobs()
    given: queue.Queue[Any] = queue.Queue()

    def broken(_: Job) -> Iterator[Any]:
        yield 1
        raise ValueError("no")

    jobs.start("a", broken, given.put)
    assert isinstance(ended(given), ValueError)
    jobs.start("a", lambda _: iter([2]), given.put)
    assert given.get(timeout=LONG) == 2
    jobs.close()


def test_closing_stops_what_runs() -> None:
    jobs, work = Jobs(), Endless()
    job = jobs.start("a", work, lambda _: None)
    assert work.begun.wait(LONG)
    jobs.close()
    assert job.ended.wait(LONG)


def test_a_question_is_asked_at_every_operation_of_this_thread_alone() -> None:
    asked: list[int] = []
    with Interruptible(lambda: asked.append(1)):
        torch.ones(2) + 1
        before = len(asked)
        other = threading.Thread(target=lambda: torch.ones(2) + 1)
        other.start()
        other.join()
        assert len(asked) == before >= 2
    torch.ones(2) + 1
    assert len(asked) == before


def test_a_job_that_was_called_off_never_starts() -> None:
    job = Job(1.0)
    given: list[Any] = []
    job.cancel()
    job.run(lambda _: pytest.fail("it ran"), given.append)
    assert given == [None]
    with pytest.raises(Cancelled):
        job.check()

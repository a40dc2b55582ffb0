"""One computation at a time, and only while someone waits for it."""

import queue
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

from rankscope.errors import BusyError, LateError
from rankscope_explorer.jobs import Give, InterruptMode, JobCancelled, Jobs, PageJob
from tests.raising import raises

LONG = 60.0


class Endless:
    """Work that goes on for as long as it may, in torch operations that tell nobody."""

    def __init__(self) -> None:
        self.begun, self.left = threading.Event(), threading.Event()

    def __call__(self, job: PageJob) -> Iterator[Any]:
        yield "begun"
        try:
            with InterruptMode(job.check):
                x = torch.ones(4)
                self.begun.set()
                while True:
                    x = x * 1.0
        finally:
            self.left.set()


class Given(queue.Queue[Any]):
    """What was handed out."""

    def next(self) -> Any:
        return self.get(timeout=LONG)

    def last(self) -> Any:
        """How it ended: parts before are passed over."""
        return next(item for item in iter(self.next, ...) if item is None or isinstance(item, Exception))


@pytest.fixture
def given() -> Given:
    return Given()


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    with closing(Jobs(waiting=2)) as running:
        yield running


def endless(jobs: Jobs, give: Give = lambda _: None) -> tuple[PageJob, Endless]:
    """Work of visitor a that has begun and goes on."""
    work = Endless()
    job = jobs.start("a", work, give)
    assert work.begun.wait(LONG)
    return job, work


def test_parts_come_in_order_and_then_the_end(jobs: Jobs, given: Given) -> None:
    jobs.start("a", lambda _: iter([1, 2]), given.put)
    assert [given.next() for _ in range(3)] == [1, 2, None]


def test_a_newer_request_of_the_same_visitor_stops_the_older(jobs: Jobs, given: Given) -> None:
    older = Given()
    job, work = endless(jobs, older.put)
    jobs.start("a", lambda _: iter([work.left.is_set() and job.ended.is_set()]), given.put)
    assert given.next() is True  # the newer did not run before the older had stopped
    assert job.cancelled and older.last() is None


def test_another_visitor_waits_and_is_not_called_off(jobs: Jobs, given: Given) -> None:
    first, _ = endless(jobs)
    jobs.start("b", lambda _: iter([first.ended.is_set()]), given.put)
    assert not first.cancelled
    first.cancel()
    assert given.next() is True


def test_more_than_may_wait_are_sent_away_with_a_sentence(jobs: Jobs, given: Given) -> None:
    endless(jobs)
    for name in ("b", "c"):
        jobs.start(name, lambda _: iter([]), given.put)
    with raises(BusyError, subject="waiting"):
        jobs.start("d", lambda _: iter([]), given.put)
    jobs.start("b", lambda _: iter([]), given.put)  # in its own place


def test_what_takes_too_long_ends_with_a_sentence(given: Given) -> None:
    with closing(Jobs(seconds=0.05)) as jobs:
        jobs.start("a", Endless(), given.put)
        assert isinstance(given.last(), LateError)


def test_an_error_is_handed_on_and_the_next_goes_on(jobs: Jobs, given: Given) -> None:
    def broken(_: PageJob) -> Iterator[Any]:
        yield 1
        raise ValueError("no")

    jobs.start("a", broken, given.put)
    assert isinstance(given.last(), ValueError)
    jobs.start("a", lambda _: iter([2]), given.put)
    assert given.next() == 2


def test_closing_stops_what_runs(jobs: Jobs) -> None:
    job, _ = endless(jobs)
    jobs.close()
    assert job.ended.wait(LONG)


def test_a_question_is_asked_at_every_operation_of_this_thread_alone() -> None:
    asked: list[int] = []
    with InterruptMode(lambda: asked.append(1)):
        torch.ones(2) + 1
        before = len(asked)
        other = threading.Thread(target=lambda: torch.ones(2) + 1)
        other.start()
        other.join()
        assert len(asked) == before >= 2
    torch.ones(2) + 1
    assert len(asked) == before


def test_what_is_interrupted_without_gradients_leaves_the_thread_with_them() -> None:
    job = PageJob(1.0)
    with pytest.raises(JobCancelled), InterruptMode(job.check), torch.no_grad():
        job.cancel()
        torch.ones(2)
    assert torch.is_grad_enabled()


def test_a_job_that_was_called_off_never_starts() -> None:
    job = PageJob(1.0)
    given: list[Any] = []
    job.cancel()
    job.run(lambda _: pytest.fail("it ran"), given.append)
    assert given == [None]
    with pytest.raises(JobCancelled):
        job.check()

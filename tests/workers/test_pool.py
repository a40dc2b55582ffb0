"""Pieces of work in several processes: order, failures, deaths, deadlines, and what the caller keeps."""

import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from rankscope.workers import run_pieces, threads_set
from tests.workers.work import Counter, describe, dies, squared


def test_pieces_come_longest_first_and_one_that_fails_stops_no_other() -> None:
    results = list(run_pieces(squared, [2, 5, 9, 1], cost=float))
    assert [result.piece for result in results] == [9, 5, 2, 1]
    assert [result.value for result in results] == [81, None, 4, 1]
    assert results[1].error == "ValueError: five"


def test_pieces_are_taken_as_they_are_needed() -> None:
    taken = []

    def pieces() -> Iterator[int]:
        for number in range(9):
            taken.append(number)
            yield number

    with closing(run_pieces(squared, pieces())) as results:
        assert [next(results).value for _ in range(3)] == [0, 1, 4]
    assert taken == [0, 1, 2]


def test_after_the_deadline_nothing_begins() -> None:
    assert list(run_pieces(squared, [2, 1], cost=float, deadline=time.time())) == []
    assert list(run_pieces(squared, [2, 1], deadline=time.time())) == []


def test_a_worker_that_dies_costs_its_own_piece_alone_which_is_tried_once_more(tmp_path: Path) -> None:
    pieces = [str(tmp_path / "seen"), "always", ""]
    results = {result.piece: result for result in run_pieces(dies, pieces, 2)}
    assert set(results) == {*pieces}
    assert "died twice (exit code 3" in str(results.pop("always").error)
    assert all(result.error is None and result.value != os.getpid() for result in results.values())


@pytest.mark.slow
def test_threads_and_environment_are_set_for_workers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    before, threads = dict(os.environ), torch.get_num_threads()
    with threads_set(threads + 1):
        seen = [result.value for result in run_pieces(describe, [True, False], 2)]
        assert torch.get_num_threads() == threads + 1
    assert dict(os.environ) == before and torch.get_num_threads() == threads
    indices, variables, counts, groups = zip(*seen, strict=True)
    assert {*indices} <= {0, 1} and {*variables} == {"1"} and {*counts} == {1}
    assert os.getpgid(0) not in groups  # Ctrl-C does not reach them


def test_work_keeps_its_state_in_its_worker() -> None:
    work = Counter()
    assert sorted(result.value or 0 for result in run_pieces(work, range(3), 1)) == [1, 2, 3]
    assert work.count == 0


def test_whoever_stops_listening_ends_the_workers() -> None:
    with closing(run_pieces(os.getpgid, [0] * 50, 1)) as results:
        group = next(results).value
    assert group
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


def test_the_time_of_a_piece_is_its_own_whether_it_fails_or_not() -> None:
    """Clocks count from when the machine was started, which is longer ago than the test."""
    begun = time.perf_counter()
    results = list(run_pieces(squared, [5, 9]))
    spent = time.perf_counter() - begun
    assert {result.error is None for result in results} == {True, False}
    assert all(0.0 <= result.seconds <= spent for result in results)

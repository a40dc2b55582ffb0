"""Pieces of work in several processes at a time, the longest first, until a time is over.

A process is started anew (`spawn`, which CUDA needs) and takes one piece after another; it has one thread, so
that a piece gives the same numbers however many run. A process that dies takes along what ran beside it in
the others: all of it is tried once more.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

Piece = TypeVar("Piece")
Found = TypeVar("Found")
DEATHS = 3
"""Times that processes may die before what is left is given up."""


@dataclass(frozen=True)
class Made(Generic[Piece, Found]):
    """What came of a piece: what was found, or why there is nothing."""

    piece: Piece
    found: Found | None
    seconds: float
    failed: str | None = None


@dataclass
class Queue(Generic[Piece]):
    """Pieces by their size, and the time that is left."""

    waiting: list[Piece]
    size: Callable[[Piece], float]
    until: float
    """In seconds since 1970; infinite where there is no end."""
    slowest: float = field(default=0.0, init=False)
    """Seconds for one of size, seen so far."""

    def next(self) -> Piece | None:
        """The largest that can be done in time, as far as can be told."""
        for place, piece in enumerate(self.waiting):
            if time.time() + self.slowest * self.size(piece) < self.until:
                return self.waiting.pop(place)
        return None

    def heard(self, piece: Piece, seconds: float) -> None:
        """How long one took."""
        self.slowest = max(self.slowest, seconds / self.size(piece))


def side_by_side(
    work: Callable[[Piece], Found],
    pieces: Sequence[Piece],
    workers: int = 1,
    *,
    size: Callable[[Piece], float],
    until: float = float("inf"),
) -> Iterator[Made[Piece, Found]]:
    """What comes of each piece, as it ends; one that fails stops no other. Those that are not given were not
    begun in time. `work` is a function of a module: processes look it up by its name."""
    queue = Queue(sorted(pieces, key=size, reverse=True), size, until)
    made = _one_by_one(work, queue) if workers == 1 else _pooled(work, queue, workers)
    for each in made:
        if each.failed is None:
            queue.heard(each.piece, each.seconds)
        yield each


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch has one: sums are then added up in one order on any machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _done(work: Callable[[Piece], Found], piece: Piece) -> Made[Piece, Found]:
    start = time.perf_counter()
    try:
        with one_thread():
            found = work(piece)
    except Exception as error:  # whatever it is, the others go on
        return Made(piece, None, time.perf_counter() - start, f"{type(error).__name__}: {error}")
    return Made(piece, found, time.perf_counter() - start)


def _one_by_one(work: Callable[[Piece], Found], queue: Queue[Piece]) -> Iterator[Made[Piece, Found]]:
    while (piece := queue.next()) is not None:
        yield _done(work, piece)


def _pooled(
    work: Callable[[Piece], Found], queue: Queue[Piece], workers: int
) -> Iterator[Made[Piece, Found]]:
    for death in range(DEATHS):
        running: dict[Future[Made[Piece, Found]], Piece] = {}
        with _hired(workers) as pool:
            try:
                while True:
                    while len(running) < workers and (piece := queue.next()) is not None:
                        running[pool.submit(_done, work, piece)] = piece
                    if not running:
                        return
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        made = future.result()
                        del running[future]
                        yield made
            except BrokenProcessPool as error:
                lost = list(running.values())
                if death + 1 < DEATHS:
                    queue.waiting[:0] = lost
                else:
                    yield from (Made(piece, None, 0.0, f"its process died: {error}") for piece in lost)


def _hired(workers: int) -> ProcessPoolExecutor:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "POLARS_MAX_THREADS"):
        os.environ.setdefault(name, "1")  # read by libraries when a process starts
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))

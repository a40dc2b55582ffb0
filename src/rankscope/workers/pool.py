"""`run_pieces`: pieces of work in several processes of one machine, each result given when its piece ends.

`engine/work.py` (cells of a sweep), `rankscope_studies.remedies` (measurements and trainings of remedies) call it.
In order: workers are started when there is a piece for them; each reads `work` (a function or an object with
`__call__`, pickled) from its pipe, and then one piece after another, until the pipe is closed. A worker that
dies (killed for its memory, say) takes only its own piece with it: another worker starts, and the piece is
tried once more. The caller's process does no work itself, so that nothing a piece does can end it.

All processes of a sweep have the same number of threads (`threads_set`): then sums are the same on any machine.

Why no kept library does this: the pools of `concurrent.futures` (3.11) and loky break as a whole where one worker
dies, and every piece that waits fails with it; with a pool of one process for each worker, this file would still hand
out pieces, try them again and count the time that is left. What a pool of `concurrent.futures` has begun cannot be
ended before Python 3.14 (`kill_workers`), so that Ctrl-C would wait for pieces of an hour; its workers get the caller's
SIGINT and its environment, in which threads are counted. A fork cannot use CUDA, and the other ways in which
`multiprocessing` starts a process run the caller's script again in each. loky has answers to the last three; it would
be one more dependency, in the place of the few lines that start a process by `subprocess`.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Generic, TypeVar

Piece = TypeVar("Piece")
Result = TypeVar("Result")
TRIES = 2  # workers that a piece may take with it
PATIENCE = 5.0  # seconds for a worker whose pipe is closed to end and give its exit code
LIMITS = ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "POLARS_MAX_THREADS"]
"""Environment variables in which libraries look up how many threads they may start."""
_index = 0


@dataclass(frozen=True)
class PieceResult(Generic[Piece, Result]):
    """What came of a piece: the value that `work` returned, or why there is none."""

    piece: Piece
    value: Result | None
    seconds: float
    error: str | None = None


def worker_index() -> int:
    """The number of the worker that this process is, from 0 on; 0 in a process that is none."""
    return _index


def run_pieces(
    work: Callable[[Piece], Result],
    pieces: Iterable[Piece],
    workers: int = 0,
    *,
    threads: int = 1,
    cost: Callable[[Piece], float] | None = None,
    deadline: float = float("inf"),
) -> Generator[PieceResult[Piece, Result], None, None]:
    """Results of all pieces in the order in which they end; a piece that fails stops no other.

    Whoever closes the iterator, or Ctrl-C, ends the workers: SIGINT goes to the caller's process alone.

    Args:
        work: Called with a piece. Pickled once for each worker, so it is a function of a module, a `partial`
            of one, or an instance of a class of a module; what an instance keeps stays in its worker.
        pieces: Taken one by one as workers become free, unless `cost` sorts them.
        workers: Processes at a time; 0 works in this process.
        threads: Of each worker.
        cost: How long a piece takes, in any unit. Where given, the longest go first, and none begins that
            would not end before the deadline, as far as pieces done so far tell.
        deadline: Seconds since 1970. Pieces that were not begun in time have no result.

    >>> [(result.piece, result.value) for result in run_pieces(abs, [-1, -3, 2], cost=abs)]
    [(-3, 3), (2, 2), (-1, 1)]
    """
    queue = _Queue(pieces, cost, deadline)
    if workers:
        yield from _Team(work, queue, workers, threads).results()
        return
    while (taken := queue.take()) is not None:
        with threads_set(threads):
            result = PieceResult(taken[0], *_attempt(work, taken[0]))
        queue.note(result)
        yield result


class _Queue(Generic[Piece]):
    """Pieces that wait, and the time that is left."""

    def __init__(self, pieces: Iterable[Piece], cost: Callable[[Piece], float] | None, deadline: float) -> None:
        self.cost, self.deadline = cost, deadline
        self.coming = iter(pieces) if cost is None else iter(())
        self.sorted = [] if cost is None else sorted(pieces, key=cost, reverse=True)
        self.again: list[tuple[Piece, int]] = []
        """Pieces whose worker died, and how often."""
        self.slowest = 0.0
        """The most seconds that a piece of cost 1 has taken."""

    def take(self) -> tuple[Piece, int] | None:
        """The next piece that can be done in time, as far as can be told, and how many workers have died of it."""
        if self.again:
            return self.again.pop()
        if self.cost is not None:
            for k, piece in enumerate(self.sorted):
                if time.time() + self.slowest * self.cost(piece) < self.deadline:
                    return self.sorted.pop(k), 0
        elif time.time() < self.deadline:
            for piece in self.coming:
                return piece, 0
        return None

    def note(self, result: PieceResult[Piece, Any]) -> None:
        """Learn from a piece that ended how long others will take."""
        if self.cost is not None and result.error is None:
            self.slowest = max(self.slowest, result.seconds / self.cost(result.piece))


@dataclass(eq=False)
class _Team(Generic[Piece, Result]):
    """The processes at work, each at its end of a pipe."""

    work: Callable[[Piece], Result]
    queue: _Queue[Piece]
    workers: int
    threads: int
    busy: dict[Connection, tuple[Piece, int]] = field(default_factory=dict)
    idle: list[Connection] = field(default_factory=list)
    processes: dict[Connection, tuple[int, subprocess.Popen[bytes]]] = field(default_factory=dict)
    """The index of each worker and its process."""

    def results(self) -> Iterator[PieceResult[Piece, Result]]:
        """Hand out pieces and collect results until nothing is left."""
        try:
            while True:
                while len(self.busy) < self.workers and (taken := self.queue.take()) is not None:
                    pipe = self._hand_out(taken[0])
                    self.busy[pipe] = taken
                if not self.busy:
                    return
                ready: Any = wait(list(self.busy))
                for pipe in ready:
                    if (result := self._collect(pipe, *self.busy.pop(pipe))) is not None:
                        self.queue.note(result)
                        yield result
        finally:
            for pipe in list(self.processes):
                self._end(pipe)

    def _hand_out(self, piece: Piece) -> Connection:
        """Send a piece to an idle worker, or to a new one; the pipe to it."""
        while self.idle:
            pipe = self.idle.pop()
            try:
                pipe.send(piece)
                return pipe
            except OSError:  # it died while it had nothing to do
                self._end(pipe)
        pipe = self._start()
        with suppress(OSError):  # dead already: `wait` finds its pipe closed
            pipe.send(self.work)
            pipe.send(piece)
        return pipe

    def _start(self) -> Connection:
        taken = {index for index, _ in self.processes.values()}
        index = next(free for free in range(self.workers + 1) if free not in taken)
        mine, theirs = Pipe()
        code = f"import sys; sys.path[:] = {sys.path!r}; from rankscope.workers.pool import serve; "
        code += f"serve({theirs.fileno()}, {index})"
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | environment(self.threads),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a library prints there is no answer of the caller's
            process_group=0,  # Ctrl-C is the caller's: it ends the workers
        )
        theirs.close()
        self.processes[mine] = index, process
        return mine

    def _collect(self, pipe: Connection, piece: Piece, deaths: int) -> PieceResult[Piece, Result] | None:
        """The result of a piece; None where its worker died and the piece is to be tried again."""
        try:
            result = PieceResult[Piece, Result](piece, *pipe.recv())
        except (EOFError, OSError):
            code = self._end(pipe, PATIENCE)
            if deaths + 1 < TRIES:
                self.queue.again.append((piece, deaths + 1))
                return None
            error = f"its worker died twice (exit code {code}; -9: killed, mostly for want of memory)"
            return PieceResult(piece, None, 0.0, error)
        self.idle.append(pipe)
        return result

    def _end(self, pipe: Connection, patience: float = 0.0) -> int:
        """End a worker if it does not end by itself; its exit code."""
        _, process = self.processes.pop(pipe)
        pipe.close()
        try:
            return process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()  # it has nothing to lose: what it hands back is all there is
            return process.wait()


def serve(handle: int, index: int) -> None:
    """Work as a worker, one piece after another until the pipe is closed."""
    global _index
    _index = index
    with Connection(handle) as pipe, suppress(EOFError, OSError):
        work = pipe.recv()
        while True:
            pipe.send(_attempt(work, pipe.recv()))


def _attempt(work: Callable[[Piece], Result], piece: Piece) -> tuple[Result | None, float, str | None]:
    """(the value, seconds, the error in words)"""
    start = time.perf_counter()
    try:
        value = work(piece)
    except Exception as error:  # whatever it is, the other pieces go on
        return None, time.perf_counter() - start, f"{type(error).__name__}: {error}"
    return value, time.perf_counter() - start, None


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment(threads: int) -> dict[str, str]:
    """Environment variables for a new process of so many threads."""
    return dict.fromkeys(LIMITS, str(threads))


@contextmanager
def threads_set(threads: int) -> Iterator[None]:
    """Give torch so many threads inside the block: then sums are added up in one order on any machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)

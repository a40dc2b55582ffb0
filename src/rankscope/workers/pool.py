"""`run_pieces`: pieces of work in several processes of one machine, each result given when its piece ends.

`engine/work.py` (cells of a sweep), `rankscope_studies.remedies` (measurements and trainings of remedies) call it.
In order: workers are started when there is a piece for them; each reads `work` (a function or an object with
`__call__`, pickled) from its pipe, and then one piece after another, until the pipe is closed. A worker that
dies (killed for its memory, say) takes only its own piece with it: another worker starts, and the piece is
tried once more. The caller's process does no work itself, so that nothing a piece does can end it.

Workers are started by `subprocess`: a fork cannot use CUDA, and `multiprocessing` would run the caller's
script again in each.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Generic, TypeVar

from rankscope.workers.threads import environment, threads_set

Piece = TypeVar("Piece")
Result = TypeVar("Result")
TRIES = 2  # workers that a piece may take with it
PATIENCE = 5.0  # seconds for a worker whose pipe is closed to end and give its exit code
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
    while (unit := queue.take()) is not None:
        with threads_set(threads):
            result = PieceResult(unit.piece, *_attempt(work, unit.piece))
        queue.note(result)
        yield result


@dataclass(eq=False)
class _Unit(Generic[Piece]):
    """A piece and how many workers have died of it."""

    piece: Piece
    deaths: int = 0


class _Queue(Generic[Piece]):
    """Pieces that wait, and the time that is left."""

    def __init__(self, pieces: Iterable[Piece], cost: Callable[[Piece], float] | None, deadline: float) -> None:
        self.cost, self.deadline = cost, deadline
        self.coming = iter(pieces) if cost is None else iter(())
        self.sorted = [] if cost is None else sorted(pieces, key=cost, reverse=True)
        self.again: list[_Unit[Piece]] = []
        """Pieces whose worker died."""
        self.slowest = 0.0
        """The most seconds that a piece of cost 1 has taken."""

    def take(self) -> _Unit[Piece] | None:
        """The next piece that can be done in time, as far as can be told."""
        if self.again:
            return self.again.pop()
        if self.cost is not None:
            for k, piece in enumerate(self.sorted):
                if time.time() + self.slowest * self.cost(piece) < self.deadline:
                    return _Unit(self.sorted.pop(k))
        elif time.time() < self.deadline:
            for piece in self.coming:
                return _Unit(piece)
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
    busy: dict[Connection, _Unit[Piece]] = field(default_factory=dict)
    idle: list[Connection] = field(default_factory=list)
    processes: dict[Connection, tuple[int, subprocess.Popen[bytes]]] = field(default_factory=dict)
    """The index of each worker and its process."""

    def results(self) -> Iterator[PieceResult[Piece, Result]]:
        """Hand out pieces and collect results until nothing is left."""
        try:
            while True:
                while len(self.busy) < self.workers and (unit := self.queue.take()) is not None:
                    self._hand_out(unit)
                if not self.busy:
                    return
                ready: Any = wait(list(self.busy))
                for pipe in ready:
                    if (result := self._collect(pipe, self.busy.pop(pipe))) is not None:
                        self.queue.note(result)
                        yield result
        finally:
            for pipe in list(self.processes):
                self._end(pipe)

    def _hand_out(self, unit: _Unit[Piece]) -> None:
        while self.idle:
            pipe = self.idle.pop()
            try:
                pipe.send(unit.piece)
            except OSError:  # it died while it had nothing to do
                self._end(pipe)
            else:
                self.busy[pipe] = unit
                return
        pipe = self._start()
        with suppress(OSError):  # dead already: `wait` finds its pipe closed
            pipe.send(self.work)
            pipe.send(unit.piece)
        self.busy[pipe] = unit

    def _start(self) -> Connection:
        taken = {index for index, _ in self.processes.values()}
        index = next(free for free in range(self.workers + 1) if free not in taken)
        mine, theirs = Pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from rankscope.workers.pool import serve; "
            f"serve({theirs.fileno()}, {index})"
        )
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

    def _collect(self, pipe: Connection, unit: _Unit[Piece]) -> PieceResult[Piece, Result] | None:
        """The result of a piece; None where its worker died and the piece is to be tried again."""
        try:
            result = PieceResult[Piece, Result](unit.piece, *pipe.recv())
        except (EOFError, OSError):
            code = self._end(pipe, PATIENCE)
            unit.deaths += 1
            if unit.deaths < TRIES:
                self.queue.again.append(unit)
                return None
            error = f"its worker died twice (exit code {code}; -9: killed, mostly for want of memory)"
            return PieceResult(unit.piece, None, 0.0, error)
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

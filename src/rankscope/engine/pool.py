"""Cells on the processes of one machine.

Each worker is a process of its own with a pipe; it is given a cell when it has done the last. A worker that
dies (killed for its memory, say) takes one cell with it: another worker starts, and the cell is tried once
more; if that one dies too, the cell has failed.
"""

import os
from collections.abc import Iterable, Iterator
from multiprocessing import connection, get_context
from typing import Any

from rankscope.engine.factors import Cell
from rankscope.engine.shared import Shared
from rankscope.engine.spec import Asked
from rankscope.engine.work import Outcome, Worker

TRIES = 2
"""Workers that a cell may take with it."""
Numbered = tuple[int, Cell]


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Local:
    """`workers` processes of `threads` threads each."""

    def __init__(self, workers: int | None = None, threads: int = 1, device: str = "cpu") -> None:
        self.workers = max(1, cores() // threads) if workers is None else workers
        self.threads, self.device = threads, device

    def outcomes(
        self, cells: Iterable[Numbered], asked: Asked, shared: Shared
    ) -> Iterator[tuple[int, Outcome]]:
        """What came of each cell, by its number, in the order in which they end."""
        if self.workers == 1:
            worker = Worker(self.threads, self.device)
            for number, cell in cells:
                yield number, worker.do(cell, asked, shared.opener(cell))
            return
        yield from _Team(self, asked, shared).run(cells)


class _Team:
    """Processes at work."""

    def __init__(self, local: Local, asked: Asked, shared: Shared) -> None:
        self.local, self.asked, self.shared = local, asked, shared
        self.context = get_context("spawn")
        self.busy: dict[Any, tuple[Any, Numbered]] = {}
        """(process, what it is doing) by the pipe to it."""
        self.deaths: dict[int, int] = {}

    def run(self, cells: Iterable[Numbered]) -> Iterator[tuple[int, Outcome]]:
        waiting, again = iter(cells), list[Numbered]()
        idle: list[tuple[Any, Any]] = []
        try:
            while True:
                while len(self.busy) < self.local.workers:
                    task = again.pop() if again else next(waiting, None)
                    if task is None:
                        break
                    pipe, process = idle.pop() if idle else self._hired()
                    try:
                        pipe.send((task[1], self.shared.opener(task[1])))
                    except OSError:  # it died while it had nothing to do
                        again.append(task)
                        continue
                    self.busy[pipe] = process, task
                if not self.busy:
                    return
                for pipe in connection.wait(list(self.busy)):
                    process, task = self.busy.pop(pipe)
                    try:
                        outcome = pipe.recv()
                    except EOFError:
                        outcome = self._died(process, task)
                        if outcome is None:
                            again.append(task)
                    else:
                        idle.append((pipe, process))
                    if outcome is not None:
                        yield task[0], outcome
        finally:
            for pipe, process in [*idle, *((pipe, process) for pipe, (process, _) in self.busy.items())]:
                pipe.close()
                process.terminate()
            for _, process in idle:
                process.join(5)

    def _hired(self) -> tuple[Any, Any]:
        mine, theirs = self.context.Pipe()
        given = (theirs, self.asked, self.local.threads, self.local.device)
        process = self.context.Process(target=_serve, args=given, daemon=True)
        process.start()
        theirs.close()
        return mine, process

    def _died(self, process: Any, task: Numbered) -> Outcome | None:
        """None where the cell is to be tried again."""
        process.join()
        self.deaths[task[0]] = self.deaths.get(task[0], 0) + 1
        if self.deaths[task[0]] < TRIES:
            return None
        said = f"its worker died twice (exit code {process.exitcode}; -9: killed, mostly for want of memory)"
        return Outcome(reason=said, lasting=False)


def _serve(pipe: Any, asked: Asked, threads: int, device: str) -> None:
    """A worker: one cell after another until the pipe is closed."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's: it ends the workers
    worker = Worker(threads, device)
    while True:
        try:
            cell, opener = pipe.recv()
        except EOFError:
            return
        pipe.send(worker.do(cell, asked, opener))

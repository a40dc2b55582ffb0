"""Cells on the processes of one machine.

Each worker is a process of its own with a pipe; it is given a cell when it has done the last. A worker that
dies (killed for its memory, say) takes one cell with it: another worker starts, and the cell is tried once
more; if that one dies too, the cell has failed. The driver itself measures nothing, so that nothing a cell
does can end it.
"""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from rankscope.engine.factors import Cell
from rankscope.engine.spec import SweepOptions
from rankscope.engine.work import InputsLoader, CellOutcome, CellWorker
from rankscope.errors import SweepError

TRIES = 2
"""Workers that a cell may take with it."""
PATIENCE = 5.0
"""Seconds for a worker whose pipe is closed to say with what code it ended."""
THREADS = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS",
    "POLARS_MAX_THREADS",
)  # fmt: skip
"""Where libraries look up how many threads they may start."""
CellTask = tuple[int, Cell, InputsLoader]
"""The number of a cell, its factors, and what finds its network and tokens."""


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment(threads: int) -> dict[str, str]:
    """Of a worker of so many threads."""
    return dict.fromkeys(THREADS, str(threads))


class Local:
    """`workers` processes of `threads` threads each; with `gpus` for each cell, on these in turn."""

    def __init__(self, workers: int | None = None, threads: int = 1, gpus: float = 0.0) -> None:
        self.threads, self.gpus = threads, _gpus() if gpus else 0
        if gpus > self.gpus:
            raise SweepError(
                f"gpus_per_cell must be at most what this machine has, {self.gpus}; got {gpus:g}: 0 measures "
                "on the CPU"
            )
        most = max(1, int(self.gpus / gpus)) if gpus else max(1, cores() // threads)
        self.workers = most if workers is None else workers

    def __enter__(self) -> "Local":
        return self

    def __exit__(self, *_: object) -> None:
        return

    def outcomes(self, tasks: Iterable[CellTask], asked: SweepOptions) -> Iterator[tuple[int, CellOutcome]]:
        """What came of each cell, by its number, in the order in which they end."""
        return _Team(self, asked).run(tasks)

    def device(self, number: int) -> str:
        """Of the worker of this number."""
        return f"cuda:{number % self.gpus}" if self.gpus else "cpu"


class _Team:
    """Processes at work."""

    def __init__(self, local: Local, asked: SweepOptions) -> None:
        self.local, self.asked = local, asked
        self.busy: dict[Connection, CellTask] = {}
        self.idle: list[Connection] = []
        self.processes: dict[Connection, tuple[int, subprocess.Popen[bytes]]] = {}
        """By the pipe to each: its place in the team, and itself."""
        self.deaths: dict[int, int] = {}

    def run(self, tasks: Iterable[CellTask]) -> Iterator[tuple[int, CellOutcome]]:
        waiting, again = iter(tasks), list[CellTask]()
        try:
            while True:
                while len(self.busy) < self.local.workers:
                    task = again.pop() if again else next(waiting, None)
                    if task is None:
                        break
                    pipe = self.idle.pop() if self.idle else self._hired()
                    try:
                        pipe.send(task[1:])
                    except OSError:  # it died while it had nothing to do
                        self._buried(pipe)
                        again.append(task)
                        continue
                    self.busy[pipe] = task
                if not self.busy:
                    return
                done: Any = wait(list(self.busy))
                for pipe in done:
                    task = self.busy.pop(pipe)
                    try:
                        outcome = pipe.recv()
                        self.idle.append(pipe)
                    except (EOFError, OSError):
                        outcome = self._died(pipe, task)
                    if outcome is None:
                        again.append(task)
                    else:
                        yield task[0], outcome
        finally:
            for pipe in list(self.processes):
                self._buried(pipe)

    def _hired(self) -> Connection:
        """A new worker. Not by `multiprocessing`, which would run the caller's script again in each."""
        taken = {place for place, _ in self.processes.values()}
        place = next(number for number in range(self.local.workers + 1) if number not in taken)
        mine, theirs = Pipe()
        given = (theirs.fileno(), self.local.threads, self.local.device(place))
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from rankscope.engine.pool import serve; serve{given}"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code], env=os.environ | environment(self.local.threads),
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C is the driver's: it ends the workers
        )  # fmt: skip
        theirs.close()
        self.processes[mine] = place, process
        with suppress(OSError):  # dead already: found out with the first cell
            mine.send(self.asked)
        return mine

    def _died(self, pipe: Connection, task: CellTask) -> CellOutcome | None:
        """None where the cell is to be tried again."""
        code = self._buried(pipe, PATIENCE)
        self.deaths[task[0]] = self.deaths.get(task[0], 0) + 1
        if self.deaths[task[0]] < TRIES:
            return None
        said = f"its worker died twice (exit code {code}; -9: killed, mostly for want of memory)"
        return CellOutcome(reason=said, lasting=False)

    def _buried(self, pipe: Connection, patience: float = 0.0) -> int:
        """Ended, if it does not end by itself; its exit code."""
        _, process = self.processes.pop(pipe)
        pipe.close()
        try:
            return process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()  # it has nothing to lose: what it hands back is all there is
            return process.wait()


def serve(handle: int, threads: int, device: str) -> None:
    """A worker: one cell after another until the pipe is closed."""
    worker = CellWorker(threads, device)
    with Connection(handle) as pipe, suppress(EOFError, OSError):
        asked = pipe.recv()
        while True:
            cell, opener = pipe.recv()
            pipe.send(worker.measure(cell, asked, opener))


def _gpus() -> int:
    import torch

    found: Any = torch.cuda.device_count()
    return int(found)

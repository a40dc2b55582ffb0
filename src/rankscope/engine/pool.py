"""Cells on the processes of one machine, by the pool of `workers`."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from rankscope.engine.factors import Cell
from rankscope.engine.spec import Asked
from rankscope.engine.work import Opener, Outcome, Worker
from rankscope.errors import SweepError
from rankscope.workers import cores, run_pieces, worker_index

Task = tuple[int, Cell, Opener]
"""The number of a cell, its factors, and what finds its network and tokens."""


class Local:
    """`workers` processes of `threads` threads each; with `gpus` for each cell, on these in turn."""

    def __init__(self, workers: int | None = None, threads: int = 1, gpus: float = 0.0) -> None:
        self.threads, self.gpus = threads, _gpus() if gpus else 0
        if gpus > self.gpus:
            raise SweepError(
                f"gpus_per_cell must be at most what this machine has, {self.gpus}; got {gpus:g}: 0 measures "
                "on the CPU",
                subject="gpus_per_cell",
            )
        most = max(1, int(self.gpus / gpus)) if gpus else max(1, cores() // threads)
        self.workers = most if workers is None else workers

    def __enter__(self) -> "Local":
        return self

    def __exit__(self, *_: object) -> None:
        return

    def outcomes(self, tasks: Iterable[Task], asked: Asked) -> Iterator[tuple[int, Outcome]]:
        """The outcome of each cell, by its number, in the order in which they end."""
        work = CellWork(asked, self.threads, self.gpus)
        with closing(run_pieces(work, tasks, self.workers, threads=self.threads)) as results:
            for result in results:
                # A worker hands back every error of a cell as an outcome; only its own death is left.
                outcome = result.value or Outcome(reason=result.error, lasting=False)
                yield result.piece[0], outcome


@dataclass
class CellWork:
    """The work of one worker process: cells one after another, on its GPU where there are some."""

    asked: Asked
    threads: int
    gpus: int
    worker: Worker | None = field(default=None, init=False)

    def __call__(self, task: Task) -> Outcome:
        """The outcome of one cell."""
        if self.worker is None:
            device = f"cuda:{worker_index() % self.gpus}" if self.gpus else "cpu"
            self.worker = Worker(self.threads, device)
        _, cell, opener = task
        return self.worker.do(cell, self.asked, opener)


def _gpus() -> int:
    import torch

    count: Any = torch.cuda.device_count()
    return int(count)

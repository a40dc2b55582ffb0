"""Cells on the processes of one machine, by the pool of `workers`."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from rankscope.engine.factors import Cell
from rankscope.engine.spec import SweepOptions
from rankscope.engine.work import CellOutcome, CellWorker, InputsLoader
from rankscope.errors import SweepError
from rankscope.workers import cores, run_pieces, worker_index

CellTask = tuple[int, Cell, InputsLoader]
"""The number of a cell, its factors, and the loader of its network and tokens."""


class LocalProcesses:
    """Measures cells on `workers` processes of `threads` threads each, on GPUs in turn if `gpus` > 0."""

    def __init__(self, workers: int | None = None, threads: int = 1, gpus: float = 0.0) -> None:
        self.threads, self.gpus = threads, _gpu_count() if gpus else 0
        if gpus > self.gpus:
            raise SweepError(
                f"gpus_per_cell must be at most what this machine has, {self.gpus}; got {gpus:g}: 0 measures "
                "on the CPU",
                subject="gpus_per_cell",
            )
        most = max(1, int(self.gpus / gpus)) if gpus else max(1, cores() // threads)
        self.workers = most if workers is None else workers

    def __enter__(self) -> "LocalProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        return

    def outcomes(self, tasks: Iterable[CellTask], options: SweepOptions) -> Iterator[tuple[int, CellOutcome]]:
        """Measure cells; each outcome comes with the number of its cell, in the order in which they end."""
        work = CellWork(options, self.threads, self.gpus)
        with closing(run_pieces(work, tasks, self.workers, threads=self.threads)) as results:
            for result in results:
                # A worker returns every error of a cell as an outcome; what is left is its own death.
                outcome = result.value or CellOutcome(reason=result.error, lasting=False)
                yield result.piece[0], outcome


@dataclass
class CellWork:
    """What each worker process of the pool runs: one cell after another, on its GPU if there are any."""

    options: SweepOptions
    threads: int
    gpus: int
    worker: CellWorker | None = field(default=None, init=False)

    def __call__(self, task: CellTask) -> CellOutcome:
        """Measure one cell; the worker, and the inputs it remembers, are made with the first."""
        if self.worker is None:
            device = f"cuda:{worker_index() % self.gpus}" if self.gpus else "cpu"
            self.worker = CellWorker(self.threads, device)
        _, cell, loader = task
        return self.worker.measure(cell, self.options, loader)


def _gpu_count() -> int:
    import torch

    count: Any = torch.cuda.device_count()
    return int(count)

"""The parts of the table, each computed once and kept: here, or by processes beside this one.

A part is a kind and its settings, plain enough to be sent to another process as a line of JSON. Whoever
computes it writes it where `Setup.kept` looks for it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import polars as pl

from rankscope.errors import RankscopeError, StudyError
from rankscope.studies.remedies import cold, initial, theory
from rankscope.studies.study import Setup


class Part(NamedTuple):
    """What is to be computed, and roughly how many seconds it takes."""

    kind: str
    settings: dict[str, Any]
    seconds: float

    def __str__(self) -> str:
        return ", ".join([self.kind, *map(str, self.settings.values())])


def parts(remedies: Sequence[str], seeds: int, model: str, layers: int, full: bool) -> list[Part]:
    """All of them, the network without a remedy first."""
    every = (initial.NONE, *remedies)
    found = [Part("theorems", {"remedy": each}, 2.5) for each in every]
    found += [Part("cold", {"remedy": each, "model": model}, cold.SECONDS * layers) for each in every]
    for depth in initial.depths(full):
        found += [
            Part("initial", {"remedy": each, "place": place, "depth": depth, "seed": seed},
                 initial.SECONDS * depth * len(initial.VARIANTS))
            for each in every for place in initial.PLACES for seed in range(seeds)
        ]  # fmt: skip
    deepest = initial.depths(full)[-1]
    found += [
        Part("variance", {"remedy": each, "depth": deepest, "seed": seed}, 0.3)
        for each in every if each in theory.ADDED for seed in range(seeds)
    ]  # fmt: skip
    return found


def computed(setup: Setup, part: Part) -> pl.DataFrame:
    """One part, or what an earlier run has kept of it. Only of what is put on the model does the model decide
    anything."""
    setup = setup if part.kind == "cold" else replace(setup, models=())
    kinds = {
        "theorems": theory.refusals, "cold": cold.part, "initial": initial.part, "variance": theory.variances
    }  # fmt: skip
    return kinds[part.kind](setup, **part.settings)  # type: ignore[operator]


def each(setup: Setup, asked: Sequence[Part], workers: int = 1) -> Iterator[tuple[Part, pl.DataFrame]]:
    """Every part with its table, in the order in which they end; by so many processes where there are more
    than one. Whoever stops listening, or Ctrl-C, ends them: what was kept stays."""
    if workers < 2:
        for part in asked:
            yield part, computed(setup, part)
        return
    free: SimpleQueue[_Process] = SimpleQueue()
    team = [_Process(setup) for _ in range(workers)]
    for one in team:
        free.put(one)

    def by_one(part: Part) -> tuple[Part, pl.DataFrame]:
        worker = free.get()
        try:
            worker.compute(part)
        finally:
            free.put(worker)
        return part, computed(setup, part)

    pool = ThreadPoolExecutor(workers)
    try:
        waiting: set[Future[tuple[Part, pl.DataFrame]]] = {pool.submit(by_one, part) for part in asked}
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            yield from (one.result() for one in done)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for one in team:
            one.process.kill()
        pool.shutdown()  # nobody waits for an answer any more
        for one in team:
            one.close()


class _Process:
    """A process that computes one part at a time. Started without `multiprocessing`, which would run the
    caller's script again."""

    def __init__(self, setup: Setup) -> None:
        given = {"folder": str(setup.folder.resolve()), "full": setup.full, "device": setup.device,
                 "models": list(setup.models)}  # fmt: skip
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from rankscope.studies.remedies.parts import serve; "
            f"serve({given!r})"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            process_group=0,  # Ctrl-C is the caller's, who ends it
        )  # fmt: skip

    def compute(self, part: Part) -> None:
        """Have it computed and kept."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps([part.kind, part.settings, part.seconds]) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except OSError:
            answer = ""
        if not answer:
            raise StudyError(
                f"a process that computed {part} died, mostly for want of memory: ask for fewer --workers; "
                "the same command goes on from here"
            )
        if error := json.loads(answer):
            raise StudyError(error)

    def close(self) -> None:
        """After its end."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(OSError):  # what was not sent yet
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def serve(given: dict[str, Any]) -> None:
    """In such a process: a part a line, answered by a line: what went wrong, or nothing."""
    setup = Setup(Path(given["folder"]), given["full"], given["device"], tuple(given["models"]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is not an answer
    for line in sys.stdin:
        try:
            computed(setup, Part(*json.loads(line)))
            said = ""
        except RankscopeError as error:
            said = str(error)
        answers.write(json.dumps(said) + "\n")
        answers.flush()

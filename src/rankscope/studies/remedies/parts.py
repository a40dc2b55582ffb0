"""The parts of the table, each computed once and kept: here, or by processes beside this one.

Whoever computes a part writes it where `Setup.kept` looks for it.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import polars as pl

from rankscope.errors import StudyError
from rankscope.studies.remedies import cold, initial, theory
from rankscope.studies.study import Setup
from rankscope.workers import run_pieces


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
    away = replace(setup, folder=setup.folder.resolve(), say=_silent)
    with closing(run_pieces(partial(computed, away), asked, workers)) as results:
        for result in results:
            if result.value is None:
                raise StudyError(
                    f"{result.piece} could not be computed: {result.error}; the same command goes on from "
                    "here, with fewer --workers where memory was short",
                    subject=result.piece.kind,
                )
            yield result.piece, result.value


def _silent(_: str) -> None:
    """Nobody hears what a worker says."""

"""Sweeps: what a cell costs beside its own work, and what a second worker brings.

A worker starts by importing torch, once: `whole` counts that, the others the time from the first cell that
ended to the last, for each cell between them. The bare loop does the same cells in one process with one
thread, and keeps nothing.
"""

import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.timing import Row
from rankscope import fresh, measure
from rankscope.engine import sweep
from rankscope.sources import bundled_excerpts

TOKENS, SAMPLES = 16, 2


class Taken(NamedTuple):
    """Seconds of a sweep: all of it, and a cell when it is under way."""

    whole: float
    cell: float


def rows(small: bool = False) -> list[Row]:
    """(what, against what, ratio)."""
    spec = _spec(*((1, 2) if small else (15, 4)))
    loop = _looped(spec)
    cells = len(spec["grid"]["depth"]) * len(spec["grid"]["skip"]) * spec["grid"]["seed"]["range"]
    one, two = _swept(spec, workers=1), _swept(spec, workers=2)
    plain = f"bare loop, {1000 * loop / cells:.0f} ms a cell"
    found = [
        (f"{cells} cells, start and all, 1 worker", plain, one.whole / loop),
        ("a cell, 1 worker", plain, one.cell * cells / loop),
        ("cells a second, 2 workers", "1 worker", one.cell / two.cell),
        (f"{cells} cells, start and all, 1 worker", "2 workers", one.whole / two.whole),
    ]
    if not small and find_spec("ray") is not None:
        there = [_swept(spec, workers=number, on="ray") for number in (1, 2)]
        found.append(("a cell on Ray, 1 worker", plain, there[0].cell * cells / loop))
        found.append(("cells a second on Ray, 2 workers", "1 worker", there[0].cell / there[1].cell))
    return found


def _spec(seeds: int, levels: int) -> dict[str, Any]:
    grid = {"depth": [6, 12][:levels], "skip": [k / levels for k in range(levels)], "seed": {"range": seeds}}
    return {"all": {"model": "bert-tiny", "samples": SAMPLES, "tokens": TOKENS}, "grid": grid}


def _looped(spec: dict[str, Any]) -> float:
    """Seconds of the loop that one would write."""
    threads, texts = torch.get_num_threads(), bundled_excerpts(TOKENS)[:SAMPLES]
    torch.set_num_threads(1)
    try:
        measure(fresh("bert-tiny"), *fresh("bert-tiny").encode(texts, TOKENS))  # what the first call prepares
        start = time.perf_counter()
        for seed in range(spec["grid"]["seed"]["range"]):
            net = fresh("bert-tiny", seed=seed)
            X, padding = net.encode(texts, TOKENS)
            for depth in spec["grid"]["depth"]:
                for skip in spec["grid"]["skip"]:
                    measure(net.variant(layers=depth, skip=skip), X, padding)
        return time.perf_counter() - start
    finally:
        torch.set_num_threads(threads)


def _swept(spec: dict[str, Any], **options: Any) -> Taken:
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        sweep(spec, Path(folder), progress=lambda done, of: ends.append(time.perf_counter()), **options)
        whole = time.perf_counter() - start
    ended = ends[1:]  # the first says that none is done
    return Taken(whole, (ended[-1] - ended[0]) / max(1, len(ended) - 1))

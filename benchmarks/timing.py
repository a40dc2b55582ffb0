"""Timing things against each other: interleaved, the least of several rounds."""

import gc
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

Row = tuple[str, str, float]
"""(what, against what, ratio): every `rows` gives these; with `small` at sizes that take a second or so."""


def least_seconds(cases: Mapping[str, Callable[[], object]], rounds: int = 5) -> dict[str, float]:
    """The fastest round of each case; cases take turns, so that a busy machine slows them alike."""
    best = dict.fromkeys(cases, float("inf"))
    for case in cases.values():
        case()
    for _ in range(rounds):
        for name, case in cases.items():
            start = time.perf_counter()
            case()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def ratios(plain: str, cases: Mapping[str, Callable[[], object]], rounds: int = 5) -> list[Row]:
    """Each case against the one called "plain", of which `plain` says what it is."""
    seconds = least_seconds(cases, rounds)
    base = seconds.pop("plain")
    return [(name, f"{plain}, {base:.2f} s", each / base) for name, each in seconds.items()]


@torch.no_grad()
def forward(net: Any, X: torch.Tensor) -> list[int]:
    """A plain pass of one of our networks, of which nothing is kept."""
    return [step.layer for step in net.steps(X)]


def rise_of_memory(*program: str) -> float:
    """MB that `report_rise` prints last in a program (arguments of Python) in a process of its own."""
    return float(last_line(*program))


def last_line(*program: str) -> str:
    """What a program (arguments of Python) prints last, in a process of its own that gives freed memory back."""
    command = [sys.executable, *program]
    # Blocks from 64 KiB on go back to the system when freed, so that resident memory is what is held. On ARM
    # torch allocates by mimalloc, which has a word of its own for that.
    given_back = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MIMALLOC_PURGE_DELAY": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | given_back)
    return done.stdout.strip().splitlines()[-1]


def report_rise(plain: Callable[[], object], case: Callable[[], object]) -> None:
    """Print by how many MB the case raises the peak that plain passes reach; what it gives stays alive."""
    kept = [plain()]
    before = min(peak(plain) for _ in range(3))
    del kept
    print(max(min(peak(case) for _ in range(3)) - before, 0.0))


def peak(case: Callable[[], object]) -> float:
    """MB of resident memory above the start, at the highest, sampled every half millisecond."""
    page = resource.getpagesize() / 2**20

    def resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * page

    peak = start = resident()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.0005):
            peak = max(peak, resident())

    thread = threading.Thread(target=watch)
    thread.start()
    result = case()
    peak = max(peak, resident())
    done.set()
    thread.join()
    del result
    gc.collect()
    return peak - start

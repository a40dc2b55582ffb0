"""Timing things against each other: interleaved, the least of several rounds."""

import time
from collections.abc import Callable, Mapping


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

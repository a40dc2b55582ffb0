"""One network under attack: every reading is right to 1e-6 in log10, or marked."""

import math
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import mpmath as mp
import torch

from rankscope.profiles import measure
from tests.attack.exact import METRICS, readings
from tests.attack.networks import Case, drawn

WITHIN = 1e-6
DIGITS = 4000
"""The most that are taken; a reading that needs more is not judged."""


@dataclass
class Verdict:
    """How the readings of one network fared."""

    kind: str
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[Any] = field(default_factory=list)
    """(layer, head, metric, ours, exact) of readings that are wrong and not marked."""
    needless: Counter[str] = field(default_factory=Counter)
    """By metric: marked, and right."""


def line_of(seed: int, kind: str | None = None) -> dict[str, Any]:
    """The verdict on one network, as a line of a file."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    found = judged(drawn(seed, kind))
    return {
        "kind": found.kind, "seed": seed, "counts": dict(found.counts), "wrong": found.wrong,
        "needless": {name: number for name, number in found.needless.items() if number},
        "seconds": round(time.perf_counter() - start, 2),
    }  # fmt: skip


def judged(case: Case) -> Verdict:
    """Ours against thousands of digits: more of them wherever the two do not agree."""
    rows = measure(case.net, case.X, case.padding, METRICS).table
    ours = {
        (layer, head, metric): (log10, marked)
        for layer, head, metric, log10, marked in rows.select(
            "layer", "head", "metric", "log10", "below_floor"
        ).iter_rows()
    }
    X = case.X[0][~case.padding[0]]
    logs = [-log for log, _ in ours.values() if log is not None and math.isfinite(log)]
    deepest = max((log for log in logs if log < DIGITS / 2), default=0.0)
    zeros = any(log == -math.inf and not marked for log, marked in ours.values())
    largest = max((-log for log in logs if -log < DIGITS / 4), default=0.0)  # scores grow with its square
    digits = int(min(max(400 * zeros, 60 + 1.5 * deepest + 2.5 * largest), DIGITS))
    found, before = Verdict(case.kind, case.seed), None
    while True:
        with mp.workdps(digits):
            exact = readings(case.net, X)
        open_ = [key for key, (log, marked) in ours.items() if not marked and not _same(log, exact[key], digits)]
        wrong = [key for key in open_ if not _unresolved(exact[key], digits)]
        settled = before is not None and all(_close(before[key], exact[key]) for key in wrong)
        deeper = [key for key in open_ if key not in wrong and abs(ours[key][0]) < DIGITS / 2]
        if ((settled or not wrong) and not deeper) or digits >= DIGITS:
            break
        before, digits = exact, min(3 * digits, DIGITS)
    for key, (log, marked) in ours.items():
        right = key not in open_ and _same(log, exact[key], digits)
        if marked:
            found.counts["marked"] += 1
            found.needless[key[2]] += right
        elif right:
            found.counts["right"] += 1
        elif key in wrong and settled:
            found.counts["wrong"] += 1
            found.wrong.append((*key, log, float(exact[key])))
        else:
            found.counts["beyond"] += 1
    return found


def _unresolved(exact: Any, digits: int) -> bool:
    """Whether a number this small may be what is left of rounding at so many digits."""
    return bool(exact < -0.6 * digits)


def _same(log: float | None, exact: Any, digits: int) -> bool:
    """Within 1e-6, of logs beyond 1000 within 1e-9 of them; or both zero, or neither a number."""
    if log is None or math.isnan(log):
        return bool(mp.isnan(exact))
    if math.isinf(log) or mp.isinf(exact):
        return float(exact) == log or (log < 0 and _unresolved(exact, digits))
    return bool(abs(exact - mp.mpf(log)) <= WITHIN * max(1, abs(exact) / 1e3))


def _close(a: Any, b: Any) -> bool:
    return a == b or bool(mp.isfinite(a) and mp.isfinite(b) and abs(a - b) < WITHIN / 100)

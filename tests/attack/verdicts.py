"""One network under attack: every reading is right to 1e-6 in log10, or marked."""

import math
import signal
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mpmath as mp
import torch

from rankscope.metrics import metric
from rankscope.profiles import measure
from tests.attack.exact import METRICS, Key, Truth, readings
from tests.attack.networks import Case, drawn

WITHIN = 1e-6
DIGITS = 4000
"""The most that are taken; a reading that needs more is not judged."""
PROOF = 1300
"""The digits to which a reading of exactly zero must be zero."""
SECONDS = 120
"""The most that one network may take; one that takes more is noted and left."""


@dataclass
class Verdict:
    """How the readings of one network fared."""

    kind: str
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    """Of readings: right, marked, beyond (not judged), wrong."""
    wrong: list[Any] = field(default_factory=list)
    """(layer, head, metric, ours, exact) of readings that are wrong and not marked."""
    needless: Counter[str] = field(default_factory=Counter)
    """By metric: marked, and right."""
    refused: str = ""
    """What was said by a `measure` that raised."""


class OutOfTimeError(BaseException):
    """Raised by a network that takes too long; not an `Exception`, so that nobody else catches it."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def line_of(
    seed: int,
    kind: str | None = None,
    feature: str = "none",
    confirm: bool = False,
    seconds: float = SECONDS,
    device: str = "cpu",
) -> dict[str, Any]:
    """The verdict on one network, as a line of a file.

    Args:
        seed: The number of the network.
        kind: Its kind; by turns if left out.
        feature: What else it has.
        confirm: Whether doubled precision is attacked.
        seconds: The most that it may take.
        device: Where ours runs.
    """
    torch.set_num_threads(1)
    start, case = time.perf_counter(), drawn(seed, kind, feature)
    found, left, failed = Verdict(case.kind, seed), False, ""
    try:
        with _time_limit(seconds):
            found = judged(case, confirm, device=device)
    except OutOfTimeError:
        left = True
    except Exception:  # of the reference: one network does not end a run of thousands
        failed = traceback.format_exc(limit=-3)
    return {
        "kind": found.kind, "seed": seed, "counts": dict(found.counts), "wrong": found.wrong,
        "needless": {name: number for name, number in found.needless.items() if number},
        "refused": found.refused, "left": left, "failed": failed,
        "seconds": round(time.perf_counter() - start, 2),
    }  # fmt: skip


def judged(case: Case, confirm: bool = False, arithmetic: str = "deviation", device: str = "cpu") -> Verdict:
    """Ours against thousands of digits: more of them wherever the two do not agree. In floating point a reading is
    right if it is no farther from them than its floor. On a GPU the third measurement is judged, which is replayed."""
    found = Verdict(case.kind, case.seed)
    options: dict[str, Any] = {"arithmetic": arithmetic, "confirm": confirm, "device": device}
    try:
        for _ in range(1 if device == "cpu" else 3):
            rows = measure(case.net, case.X, case.padding, METRICS, **options).table
    except Exception as error:
        found.refused = f"{type(error).__name__}: {error}"[:300]
        return found
    columns = ("layer", "head", "metric", "log10", "below_floor", "floor", "arithmetic")
    ours: dict[Key, tuple[float, bool]] = {}
    floors: dict[Key, float] = {}
    for layer, head, name, log10, marked, floor, ran in rows.select(columns).iter_rows():
        ours[layer, head, name] = math.nan if log10 is None else log10, marked
        if ran != "deviation":
            floors[layer, head, name] = floor or 0.0
    exact, before, digits = {}, None, _first_digits(ours)
    X, padded, broken = case.X[0][~case.padding[0]], int(case.padding.sum()), case.broken
    settled: list[Key] = []
    while True:
        with mp.workdps(digits):
            exact = readings(case.net, X, padded)
        differ = [key for key in ours if key in exact and not _same(ours[key][0], exact[key].log, broken)]
        differ = [key for key in differ if not _resolved(key[2], ours[key][0], exact[key].log, floors.get(key))]
        open_ = [key for key in differ if not ours[key][1]]
        wrong = [key for key in open_ if not _unresolved(exact[key], digits)]
        settled = [key for key in wrong if before is not None and _settled(key, before, exact)]
        deeper = [key for key in open_ if key not in wrong and not DIGITS / 2 < abs(ours[_source(key)][0]) < math.inf]
        if (len(settled) == len(wrong) and not deeper) or digits >= DIGITS:
            # Ours is far above what so many digits leave; a rank is one of whatever size.
            above = [key for key in deeper if not _unresolved(exact[key]._replace(log=ours[key][0]), digits)]
            settled += [key for key in above if key[2] != "affine_rank"]
            break
        before, digits = exact, min(3 * digits, DIGITS)
    for key, (log, marked) in ours.items():
        right, none = key in exact and key not in differ, math.isnan(log)
        if (marked and not (right and none)) or (broken and none and not right):
            # Of a network with NaN among its numbers a reading may be NaN that does not depend on it.
            found.counts["marked"] += 1
            found.needless[key[2]] += right or not marked
        elif right:
            found.counts["right"] += 1
        elif key in settled:
            found.counts["wrong"] += 1
            found.wrong.append((*key, log, mp.nstr(exact[key].log, 12)))  # which may leave float64's range
        else:
            found.counts["beyond"] += 1
    return found


def _first_digits(ours: dict[Key, tuple[float, bool]]) -> int:
    """As many as what was measured asks for."""
    logs = [-log for log, _ in ours.values() if math.isfinite(log)]
    deepest = max((log for log in logs if log < DIGITS / 2), default=0.0)
    zeros = any(log == -math.inf and not marked for log, marked in ours.values())
    largest = max((-log for log in logs if -log < DIGITS / 4), default=0.0)  # scores grow with its square
    return int(min(max(PROOF * zeros, 60 + 1.5 * deepest + 2.5 * largest), DIGITS))


def _source(key: Key) -> Key:
    """The reading that must be resolved for another: for a rank that of the residual, else itself."""
    layer, _, metric = key
    return (layer, None, "mu") if metric == "affine_rank" else key


def _settled(key: Key, before: dict[Key, Truth], exact: dict[Key, Truth]) -> bool:
    """Whether fewer digits give the same: a rank of rounding, which a norm without eps has made long, is often the same
    while the residual is not."""
    return all(_close(before[source].log, exact[source].log) for source in (key, _source(key)))


def _unresolved(exact: Truth, digits: int) -> bool:
    """Whether a number this small may be what is left of rounding at so many digits."""
    return bool(exact.log < exact.size - 0.6 * digits)


def _resolved(name: str, log: float, exact: Any, floor: float | None) -> bool:
    """Whether a reading of floating point is as good as that can be: no farther from the exact one than its floor (if
    the floor goes with eps^2, their roots than its root), or a rank that is no larger."""
    power, count = metric(name).power, metric(name).count
    if floor is None or math.isnan(log) or mp.isnan(exact):
        return False
    apart = abs(mp.mpf(10) ** (mp.mpf(log) / power) - mp.mpf(10) ** (exact / power))
    return bool(log <= exact if count else apart <= floor ** (1 / power))


def _same(log: float, exact: Any, broken: bool) -> bool:
    """Within 1e-6, of logs beyond 1000 within 1e-9 of them; or both zero, or neither a number (of numbers with
    an infinity among them, infinity is none either)."""
    if mp.isnan(exact):
        return math.isnan(log) or (broken and log == math.inf)
    if math.isnan(log) or math.isinf(log) or mp.isinf(exact):
        return float(exact) == log
    return bool(abs(exact - mp.mpf(log)) <= WITHIN * max(1, abs(exact) / 1e3))


def _close(a: Any, b: Any) -> bool:
    if mp.isnan(a) or mp.isnan(b):
        return bool(mp.isnan(a) and mp.isnan(b))
    return a == b or bool(mp.isfinite(a) and mp.isfinite(b) and abs(a - b) < WITHIN / 100)

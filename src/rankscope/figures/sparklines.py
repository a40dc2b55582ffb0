"""Curves in block letters, a character for each value: for text, where a picture has no place.

Heights are linear from 0 where values span less than two decades, else logarithmic, and logarithmic in the exponent
where that spans too much.
"""

import math
from collections.abc import Sequence
from itertools import islice
from typing import TypeGuard, TypeVar

T = TypeVar("T")
BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None], limits: tuple[float, float] | None = None) -> str:
    """One character per value, from the lowest (or 0) to the highest; a gap where there is none.

    >>> sparkline([1.0, 0.5, 0.0])
    '█▅▁'
    """
    low, high = limits or _limits(values)
    span = high - low or 1.0
    return "".join(BLOCKS[round((value - low) / span * 7)] if _is_finite(value) else " " for value in values)


def sparklines(*logs: Sequence[float | None]) -> list[str]:
    """Several curves of log10 on one scale.

    >>> sparklines([0.0, -4.0], [0.0, -2.0])
    ['█▁', '█▅']
    """
    curves = [thinned(curve) for curve in logs]
    flat = [value for curve in curves for value in curve]
    heights = scaled_for_sparkline(flat, len(flat))
    limits, rest = _limits(heights), iter(heights)
    return [sparkline([*islice(rest, len(curve))], limits) for curve in curves]


def _limits(values: Sequence[float | None]) -> tuple[float, float]:
    known = [0.0, *filter(_is_finite, values)]
    return min(known), max(known)


def thinned(values: Sequence[T], most: int = 13) -> Sequence[T]:
    """At most `most` of the values, evenly spread, the first and the last among them."""
    if len(values) <= most:
        return values
    return [values[k * (len(values) - 1) // (most - 1)] for k in range(most)]


def scaled_for_sparkline(logs: Sequence[float | None], most: int = 13) -> list[float]:
    """Heights for a sparkline: values over up to two decades, logs over up to fifty, else logs of logs."""
    thin = [k if _is_finite(k) else math.nan for k in thinned(logs, most)]
    known = [k for k in thin if math.isfinite(k)]
    span = max(known) - min(known) if known else 0.0
    if span < 2:
        top = max(known, default=0.0)  # a sparkline has no unit: values beyond floating point are drawn too
        return [10.0 ** (k - top) for k in thin]
    if span < 50:
        return thin
    return [math.copysign(math.log1p(abs(k)), k) for k in thin]


def _is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)

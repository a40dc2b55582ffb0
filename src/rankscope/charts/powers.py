"""An axis of powers of ten, for numbers that no axis of plotly reaches.

What is drawn is k = log10 of the number, so that 1e-4000 has a place. Where the numbers span over `DEEP`
decades the axis is logarithmic in k itself, as matplotlib's symlog: linear within one decade of 1, then a
unit for each factor of ten in k. A doubly exponential fall is a straight line there.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

DEEP = 40.0
"""Decades over which the axis becomes logarithmic in the exponent."""
LABELS = 8
"""Powers of ten in the exponent that are labelled, at most."""
NARROW = 3.0
"""Decades under which its labels are numbers, not powers."""
LONG = 1e6
"""Exponents from here on are themselves written as powers."""


class Powers:
    """The axis on which these log10 fit, and where each lies on it.

    >>> Powers([0.0, -1000.0]).place([-0.5, -10.0, -1000.0, math.nan])
    [-0.5, -2.0, -4.0, None]
    """

    def __init__(self, known: Iterable[float]) -> None:
        values = [k for k in known if math.isfinite(k)]
        self.low, self.high = (min(values), max(values)) if values else (-1.0, 0.0)
        self.deep = self.high - self.low > DEEP

    def place(self, log10: Sequence[float] | np.ndarray) -> list[float | None]:
        """Where each lies; None where there is no number, or it is zero."""
        return [self._place(float(k)) if math.isfinite(k) else None for k in log10]

    def axis(self, title: str) -> dict[str, Any]:
        """The axis with its labels."""
        low, high = self._place(self.low), self._place(self.high)
        room = 0.06 * (high - low) or 0.5
        ticks = self._ticks()
        return {
            "title": {"text": title},
            "range": [low - room, high + room],
            "tickvals": [self._place(k) for k in ticks],
            "ticktext": [self._label(k) for k in ticks],
            "zeroline": False,
        }

    def _place(self, k: float) -> float:
        if not self.deep or abs(k) <= 1:
            return k
        return math.copysign(1 + math.log10(abs(k)), k)

    def _ticks(self) -> list[float]:
        if self.deep:
            most = math.ceil(math.log10(max(abs(self.low), abs(self.high), 10.0)))
            steps = [10.0**m for m in range(0, most + 1, math.ceil((most + 1) / LABELS))]
            if most < 4:
                steps += [3 * step for step in steps[1:]]
            both = [-step for step in steps] + [0.0] + steps
            found = sorted(k for k in both if self.low * 1.3 - 1 <= k <= self.high * 1.3 + 1)
            return found or [self.low, self.high]
        span = self.high - self.low
        if span > NARROW:
            step = math.ceil(span / 7)
            return [
                float(k) for k in range(math.floor(self.low / step) * step, math.ceil(self.high) + 1, step)
            ]
        room = 0.06 * span or 0.5  # that of the axis
        if span <= 0.5 and self.low >= -4 and self.high < 5:
            found = _round_numbers(10 ** (self.low - room), 10 ** (self.high + room))
        else:
            digits = (1, 2, 5) if span > 0.5 else (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)
            decades = range(math.floor(self.low) - 1, math.ceil(self.high) + 1)
            found = [math.log10(digit) + decade for decade in decades for digit in digits]
            found = [k for k in found if self.low - room <= k <= self.high + room]
        ends = [math.log10(float(f"{10**k:.3g}")) if -4 <= k < 5 else k for k in {self.low, self.high}]
        return found if len(found) > 1 else sorted(ends)

    def _label(self, k: float) -> str:
        if self.high - self.low <= NARROW and -4 <= k < 5:
            return f"{10**k:.6g}"
        if abs(k - round(k)) > 1e-9 and not self.deep:
            whole = float(math.floor(k))
            return f"{10 ** (k - whole):.2g}·{self._label(whole)}"
        long = self.deep and abs(k) >= LONG
        exponent = f"{k:.6g}".replace("e+0", "e").replace("e+", "e") if long else f"{k:.0f}"
        return f"10<sup>{exponent}</sup>".replace("-", "−")


def _round_numbers(low: float, high: float) -> list[float]:
    """log10 of some round numbers in a narrow range, evenly spaced: 0.71, 0.72, 0.73.

    >>> [round(10**k, 6) for k in _round_numbers(0.702, 0.735)]
    [0.71, 0.72, 0.73]
    """
    least = (high - low) / 6
    unit = 10.0 ** math.floor(math.log10(least)) if least > 0 else 1.0
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= least)
    return [math.log10(k * step) for k in range(math.ceil(low / step), math.floor(high / step) + 1) if k > 0]

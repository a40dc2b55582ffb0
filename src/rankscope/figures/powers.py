"""An axis of powers of ten, for numbers that no axis of plotly or matplotlib reaches.

What is drawn is k = log10 of the number, so that 1e-4000 has a place. Where the numbers span over `DEEP`
decades the axis is logarithmic in k itself, as matplotlib's symlog: linear within one decade of 1, then a
unit for each factor of ten in k. A doubly exponential fall is a straight line there.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from rankscope.figures.text import LONG

DEEP = 40.0  # Decades over which the axis becomes logarithmic in the exponent
LABELS = 8  # Powers of ten in the exponent that are labelled, at most
NARROW = 3.0  # Decades under which its labels are numbers, not powers
FARTHEST = 305.0  # Powers of ten of the exponent at which an axis ends at the latest: floats end soon after


class Powers:
    """The axis on which these log10 fit, and where each lies on it.

    >>> Powers([0.0, -1000.0]).place([-0.5, -10.0, -1000.0, math.nan])
    [-0.5, -2.0, -4.0, None]
    """

    def __init__(self, logs: Iterable[float]) -> None:
        values = [k for k in logs if math.isfinite(k)]
        self.low, self.high = (min(values), max(values)) if values else (-1.0, 0.0)
        self.deep = self.high - self.low > DEEP
        self.narrow = self.high - self.low <= NARROW

    def place(self, log10: Sequence[float] | np.ndarray) -> list[float | None]:
        """Where each lies; None where there is no number, or it is zero."""
        return [self._place(float(k)) if math.isfinite(k) else None for k in log10]

    @property
    def range(self) -> tuple[float, float]:
        """The ends of the axis, as places, with some room beyond the numbers."""
        low, high = self._place(self.low), self._place(self.high)
        room = 0.06 * (high - low) or 0.5
        return low - room, high + room

    @property
    def limits(self) -> tuple[float, float]:
        """The ends of the axis as log10."""
        low, high = (self._log10(position) if self.deep else position for position in self.range)
        return low, high

    def _place(self, k: float) -> float:
        return math.copysign(1 + math.log10(abs(k)), k) if self.deep and abs(k) > 1 else k

    def _log10(self, position: float) -> float:
        return math.copysign(10 ** min(abs(position) - 1, FARTHEST), position) if abs(position) > 1 else position

    @property
    def ticks(self) -> list[float]:
        """log10 of the numbers that have a label."""
        if self.deep:
            most = math.ceil(math.log10(max(abs(self.low), abs(self.high), 10.0)))
            steps = [10.0**m for m in range(0, most + 1, math.ceil((most + 1) / LABELS))]
            if most < 4:
                steps += [3 * step for step in steps[1:]]
            both = [-step for step in steps] + [0.0] + steps
            ticks = sorted(k for k in both if self.low * 1.3 - 1 <= k <= self.high * 1.3 + 1)
            return ticks or [self.low, self.high]
        span = self.high - self.low
        if not self.narrow:
            step = math.ceil(span / 7)
            first = math.floor(self.low / step) * step
            return [float(k) for k in range(first, math.ceil(self.high) + 1, step)]
        room = 0.06 * span or 0.5  # that of the axis
        if span <= 0.5 and self.low >= -4 and self.high < 5:
            ticks = _round_numbers(10 ** (self.low - room), 10 ** (self.high + room))
        else:
            digits = (1, 2, 5) if span > 0.5 else (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)
            decades = range(math.floor(self.low) - 1, math.ceil(self.high) + 1)
            ticks = [math.log10(digit) + decade for decade in decades for digit in digits]
            ticks = [k for k in ticks if self.low - room <= k <= self.high + room]
        ends = [math.log10(float(f"{10**k:.3g}")) if -4 <= k < 5 else k for k in {self.low, self.high}]
        return ticks if len(ticks) > 1 else sorted(ends)

    def label(self, k: float) -> str:
        """The label of a log10, a power written with a caret.

        >>> Powers([0.0, -9.0]).label(-3.0), Powers([0.0, -1.0]).label(-1.0), Powers([-8.0, -9.0]).label(-8.3)
        ('10^-3', '0.1', '5·10^-9')
        """
        if self.narrow and -4 <= k < 5:
            return f"{10**k:.6g}"
        if abs(k - round(k)) > 1e-9 and not self.deep:
            decade = float(math.floor(k))
            return f"{10 ** (k - decade):.2g}·{self.label(decade)}"
        long = self.deep and abs(k) >= LONG
        return f"10^{k:.6g}".replace("e+0", "e").replace("e+", "e") if long else f"10^{k:.0f}"


def _round_numbers(low: float, high: float) -> list[float]:
    """log10 of some round numbers in a narrow range, evenly spaced: 0.71, 0.72, 0.73.

    >>> [round(10**k, 6) for k in _round_numbers(0.702, 0.735)]
    [0.71, 0.72, 0.73]
    """
    least = (high - low) / 6
    unit = 10.0 ** math.floor(math.log10(least)) if least > 0 else 1.0
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= least)
    return [math.log10(k * step) for k in range(math.ceil(low / step), math.floor(high / step) + 1) if k > 0]

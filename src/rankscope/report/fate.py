"""What becomes of the tokens of one variant: the curve of a residual as a word and a number or two."""

import math
from dataclasses import dataclass

from rankscope.figures import power
from rankscope.profiles import Profile, Summary
from rankscope.profiles.lines import log_floor, summary_floor
from rankscope.profiles.shown import middle

APART, UNIFORM = 0.05, 1e-3
"""Relative residual at the last layer above which tokens stay apart, and below which they are the same."""


@dataclass(frozen=True)
class Fate:
    """What becomes of the tokens of one variant."""

    group: str
    """apart, closing, uniform; hidden: below a floor that is itself above `UNIFORM`; broken: no number."""
    layer: int
    """uniform: the layer from which on it is below `UNIFORM`; broken: the first without a number."""
    there: str
    """The number at that layer, or the floor that it lies beneath."""
    end: str
    """The number at the last layer, or from where on it is noise."""
    depth: int
    """The last layer."""

    @property
    def at_end(self) -> str:
        """What it comes to, to follow "uniform"."""
        return self.end if "from layer" in self.end else f"to {self.end} at layer {self.depth}"


def fate(curve: list[float], noise: list[bool], floor: list[float], arithmetic: str) -> Fate:
    """What a curve of log10 comes to; `floor` is the log10 of its floor, NaN where it has none."""
    depth, last, low = len(curve) - 1, curve[-1], math.log10(UNIFORM)
    if math.isnan(last):
        broken = _from([math.isnan(value) for value in curve])
        return Fate("broken", broken, "–", f"no number from layer {broken}", depth)
    end = power(last)
    if noise[-1]:
        what = "rounding noise" if arithmetic == "deviation" else f"at {arithmetic}'s floor"
        end = f"{what} from layer {_from(noise)}"
        if floor[-1] > low:
            return Fate("hidden", depth, end, end, depth)
    if last > low:
        return Fate("apart" if last > math.log10(APART) else "closing", depth, end, end, depth)
    below = _from([value <= low for value in curve])
    there = f"{arithmetic}'s floor" if noise[below] else power(curve[below])
    return Fate("uniform", below, there, end, depth)


def fate_of(measured: Profile | Summary, metric: str, variant: str, arithmetic: str) -> Fate:
    """What becomes of the tokens of this variant in this arithmetic."""
    line = (variant, arithmetic)
    if isinstance(measured, Summary):
        floor = summary_floor(measured, metric, line)
    else:
        floor = log_floor(measured, metric, line)
    return fate(*middle(measured, metric, variant, arithmetic), floor.tolist(), arithmetic)


def _from(true: list[bool]) -> int:
    """From where on to the end all are true; the last is."""
    return next((k + 1 for k in reversed(range(len(true))) if not true[k]), 0)

"""How differences between tokens fall along a stack of layers, over seeds, and what is said of such falls.

`efficient.py` compares patterns of attention by their falls, `beyond_attention.py` other ways to mix positions.
"""

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import polars as pl

from rankscope_studies.questions.question import HypothesisVerdict
from rankscope_studies.questions.summaries import spread_of_logs

THRESHOLD = 0.1  # Tokens that share nine tenths of their length count as the same
NEAR = 0.1  # Decades: stacks that end nearer to the threshold are not told from one another by it


@dataclass(frozen=True)
class StackFall:
    """How differences fall along one kind of stack, over seeds."""

    ends: tuple[float, ...]  # log10 of what is left after the last layer, by seed
    at_floor: bool  # Some layer of some seed is marked: rounding decided it

    @property
    def end(self) -> float:
        """The median over seeds of log10 after the last layer."""
        return statistics.median(self.ends)

    @property
    def collapsed(self) -> bool:
        """True if tokens count as the same after the last layer, in the median over seeds."""
        return self.end < math.log10(THRESHOLD)

    @property
    def near(self) -> bool:
        """True if the median over seeds is so near to the threshold that the side it lies on says little."""
        return abs(self.end - math.log10(THRESHOLD)) < NEAR

    @property
    def text(self) -> str:
        """The median and the range over seeds after the last layer."""
        return spread_of_logs(self.ends) + (", floor" if self.at_floor else "")


def seed_curves(rows: pl.DataFrame) -> Iterator[tuple[list[float], int]]:
    """For each seed, log10 by layer, and how many layers come before the first that is marked."""
    for _, curve in rows.sort("seed", "layer").group_by("seed", maintain_order=True):
        marks = curve["marked"].to_list()
        yield curve["log10"].to_list(), next((layer for layer, mark in enumerate(marks) if mark), len(marks))


def collapsed(falls: Mapping[str, StackFall]) -> list[str]:
    """The names of those stacks in which tokens count as the same after the last layer."""
    return [name for name, fall in falls.items() if fall.collapsed]


def no_collapse_verdict(falls: Mapping[str, StackFall]) -> HypothesisVerdict:
    """Whether no stack collapses, with the one that keeps the least of differences."""
    lowest, lost = min(falls, key=lambda name: falls[name].end), collapsed(falls)
    below = f"; below {THRESHOLD}: {', '.join(lost)}" if lost else ""
    return HypothesisVerdict(f"the least is {lowest}: {falls[lowest].text}{below}", not lost)

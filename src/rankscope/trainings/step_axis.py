"""Where the steps of a training stand on the axis of its figures (`trainings/figures.py`).

Checkpoints are often kept at steps that double: 10, 20, 40, ... At their numbers, most of them would share a sliver
at the left edge. Such measurements stand side by side instead, each with its step below it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rankscope.figures import description as fig
from rankscope.figures import evenly

FEWEST, MOST = 5, 40  # Measurements that may stand side by side
EARLY = 0.15  # The part of a training in which half of the measurements lie, where they stand side by side
LABELS = 6  # Steps that are named below them, at most


@dataclass(frozen=True)
class StepAxis:
    """The horizontal axis of a figure by training step: to scale, or with measurements at even distances where most of
    them lie at the beginning (`side_by_side`)."""

    steps: Sequence[int]
    side_by_side: bool

    @classmethod
    def of(cls, steps: Iterable[int]) -> "StepAxis":
        """The axis that suits measurements at these steps.

        >>> StepAxis.of(range(0, 100, 10)).side_by_side, StepAxis.of([0, 10, 20, 40, 80, 160, 320]).side_by_side
        (False, True)
        """
        known = sorted(set(steps))
        crowded = FEWEST <= len(known) <= MOST and (np.median(known) <= known[0] + EARLY * (known[-1] - known[0]))
        return cls(known, bool(crowded))

    def places(self, steps: Sequence[int]) -> list[float]:
        """The coordinates of steps; one between two measurements stands between them."""
        if not self.side_by_side:
            return [*steps]
        places: list[float] = np.interp(steps, self.steps, range(len(self.steps))).tolist()
        return places

    def axis(self, grid: bool = True, range: tuple[float, float] | None = None) -> fig.Axis:
        """The axis of a panel, with its ends if they are given."""
        if not self.side_by_side:
            return fig.Axis("step", steps=True, range=range, grid=grid)
        named = evenly([*enumerate(self.steps)], LABELS)
        labels = {float(place): f"{step:,}" for place, step in named}
        ends = (-0.3, len(self.steps) - 0.7) if range is None else range
        return fig.Axis("step, not to scale", labels=labels, range=ends, grid=grid)

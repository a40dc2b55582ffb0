"""Convex hull: points uniform in a square that is shifted as a whole; which of them are on their hull?"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from rankscope.lab.model import Interface
from rankscope.lab.tasks.fixed import FixedTask, LabelledSamples, agree
from rankscope.shapes import Bool, Float

POINTS, SIDE, SHIFT = 10, 10.0, 3.3


@dataclass(frozen=True)
class Hull(FixedTask):
    """Ten points, without positions: their order says nothing."""

    train: int = 10000
    test: int = 300
    seed: int = 0
    name: ClassVar[str] = "hull"
    says: ClassVar[str] = "whether a point is on the convex hull of all"

    @property
    def interface(self) -> Interface:
        """Two classes: on the hull, or not."""
        return Interface(classes=2, coordinates=2)

    def drawn(self) -> tuple[LabelledSamples, LabelledSamples]:
        """Points counted from the middle of the square, in halves of its side; the shift is normal."""
        draw = np.random.default_rng(self.seed)

        def samples(number: int) -> LabelledSamples:
            points = draw.uniform(0, SIDE, (number, POINTS, 2))
            points = points + draw.normal(scale=SHIFT, size=(number, 1, 2))
            labels = np.stack([on_hull(cloud) for cloud in points])
            return LabelledSamples(
                2 * torch.from_numpy(points).float() / SIDE - 1,
                torch.from_numpy(labels).long(),
                torch.zeros(number, POINTS, dtype=torch.bool),
            )

        return samples(self.train), samples(self.test)

    def guesses(self, train: LabelledSamples, test: LabelledSamples) -> dict[str, float]:
        """Most points are on it."""
        return {"chance": 0.5, "majority": agree(train.labels.flatten().mode().values, test.labels)}


def on_hull(points: Float[np.ndarray, "point 2"]) -> Bool[np.ndarray, " point"]:
    """Which points are corners of their convex hull."""
    from scipy.spatial import ConvexHull

    on_corner = np.zeros(len(points), dtype=bool)
    on_corner[ConvexHull(points).vertices] = True
    return on_corner

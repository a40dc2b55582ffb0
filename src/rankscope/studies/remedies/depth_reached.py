"""How deep a network may be before its tokens are nearly the same: a number to choose a remedy by.

*Depth reached* is the number of layers after which the relative residual is still at or above `THRESHOLD`,
counted from the first up to the one where it falls below for the first time. Of a network whose residual
never does, only a lower limit is known, its own depth: `whole` says so, and it is written `all 48`.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

THRESHOLD = 0.1
"""Tokens that share nine tenths of their length. Excerpts of the bundled text begin at about 0.7."""


class DepthReached(NamedTuple):
    """A depth, and whether it is all that there was."""

    layers: float
    whole: bool

    def __str__(self) -> str:
        return f"all {self.layers:g}" if self.whole else f"{self.layers:g}"


def depth_reached(log10: Sequence[float], threshold: float = THRESHOLD) -> DepthReached:
    """The depth that a curve of log10 of the relative residual reaches, the input first. A curve that ends in
    what is not a number, where tokens overflow, is known up to there.

    >>> depth_reached([0.0, -0.5, -1.5, -0.2]), depth_reached([0.0, -0.5])
    (DepthReached(layers=1, whole=False), DepthReached(layers=1, whole=True))
    """
    known = 0
    for layer, value in enumerate(log10):
        if math.isnan(value):
            return DepthReached(known, False)
        if layer and value < math.log10(threshold):
            return DepthReached(layer - 1, False)
        known = layer
    return DepthReached(known, True)


def over_seeds(depths: Sequence[DepthReached]) -> DepthReached:
    """The median of several networks; `whole` where that is one that never fell."""
    middle = statistics.median(depth.layers for depth in depths)
    return DepthReached(middle, all(depth.whole for depth in depths if depth.layers >= middle))


def spread(depths: Sequence[DepthReached]) -> str:
    """The median, and the range over seeds where they differ.

    >>> spread([DepthReached(8, False), DepthReached(9, False), DepthReached(12, True)])
    '9 (8–12)'
    """
    middle, low, high = (str(over_seeds(depths)), *(end(depth.layers for depth in depths) for end in (min, max)))
    return middle if low == high else f"{middle} ({low:g}–{high:g})"

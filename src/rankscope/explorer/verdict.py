"""What a curve says, in a sentence."""

import math
from collections.abc import Sequence
from itertools import pairwise

from rankscope.figures import power

MARKS = (1e-12, 1e-6, 1e-3)
"""Shares of the tokens' size that a sentence names."""
APART = 0.05


def verdict(logs: Sequence[float], tokens: int) -> str:
    """Of log10 of the relative residual by layer.

    >>> verdict([-0.1, -0.4, -1.7], 5)
    'Tokens draw together: at layer 2 they differ by 0.02 of their size.'
    >>> verdict([-0.5, -5.0, -16.0, -48.4], 5)
    'Tokens are uniform to 1e-12 by layer 2, and to 4.0e-49 at layer 3: each layer cubes the difference.'
    """
    last, depth = logs[-1], len(logs) - 1
    if tokens == 1:
        return "One token alone: there is no other for it to become equal to."
    broken = next((layer for layer, value in enumerate(logs) if math.isnan(value)), None)
    if broken is not None:
        return (
            f"Numbers overflow at layer {broken}: tokens grow without bound, and there is nothing to compare."
        )
    mark = next((mark for mark in MARKS if last <= math.log10(mark)), None)
    if mark is not None:
        layer = next(layer for layer, value in enumerate(logs) if value <= math.log10(mark))
        said = f"Tokens are uniform to {mark:g} by layer {layer}"
        if depth > layer:
            exactly = "equal" if math.isinf(last) else f"to {power(last)}"
            said += f", and {exactly} at layer {depth}"
        return f"{said}{_rate(logs)}."
    size = f"at layer {depth} they differ by {power(last)} of their size"
    if last > math.log10(APART):
        return f"Tokens stay apart: {size}."
    return f"Tokens draw together: {size}."


def _rate(logs: Sequence[float]) -> str:
    """Where the logs themselves grow by a factor of three, as in pure attention."""
    known = [value for value in logs if math.isfinite(value) and value < -1]
    ratios = [later / earlier for earlier, later in pairwise(known)]
    if ratios and all(2.6 < ratio < 3.6 for ratio in ratios[-2:]):
        return ": each layer cubes the difference"
    return ""

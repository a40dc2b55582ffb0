"""Metrics that rank the same networks differently: said, so that nobody reads one number alone."""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations

from rankscope.figures.text import power
from rankscope.metrics import direction_of, is_share
from rankscope.profiles.views import CurveView

MARGIN = 0.02
"""Decades by which two values must differ for one to be larger: five per cent."""

Ends = Mapping[str, Mapping[str, float]]
"""Of each metric, log10 at the end of each network by name."""


def disagreement(ends: Ends) -> str:
    """Two metrics that rank two networks differently, the first metric before others and shares before sizes;
    nothing where all agree.

    >>> ends = {"relative_mu": {"a": -1.0, "b": -2.0}, "mu": {"a": 0.0, "b": 1.0}}
    >>> disagreement(ends)  # doctest: +ELLIPSIS
    'Metrics rank them differently: by relative_mu tokens are further apart in a (0.1) than in b (0.01), ...'
    """
    known = [metric for metric in ends if direction_of(metric)]
    found = []
    for one, other in combinations(known, 2):
        for a, b in combinations([name for name in ends[one] if name in ends[other]], 2):
            gaps = [direction_of(metric) * (ends[metric][a] - ends[metric][b]) for metric in (one, other)]
            sure = min(map(abs, gaps))
            if gaps[0] * gaps[1] < 0 and MARGIN < sure < math.inf:
                order = (one == known[0], is_share(one) and is_share(other), sure)
                found.append((order, one, other, (a, b) if gaps[0] > 0 else (b, a)))
    if not found:
        return ""
    _, one, other, (far, near) = max(found)
    first, second = ([power(ends[metric][name]) for name in (far, near)] for metric in (one, other))
    why = ""
    if is_share(one) != is_share(other):
        size = other if is_share(one) else one
        why = f": {size} grows with the size of the tokens, which a share leaves out"
    return (
        f"Metrics rank them differently: by {one} tokens are further apart in {far} ({first[0]}) than in "
        f"{near} ({first[1]}), by {other} in {near} ({second[1]} against {second[0]}){why}."
    )


def ends_of(curves: Mapping[str, Sequence[CurveView]]) -> dict[str, dict[str, float]]:
    """Of curves by metric: where each ends, but for what ends in rounding noise."""
    return {
        metric: {
            each.name: float(each.log10[-1])
            for each in every
            if each.floor_from is None and math.isfinite(each.log10[-1]) and each.value[-1] > 0
        }
        for metric, every in curves.items()
    }

"""Numbers of several seeds as text, verdicts and rank correlations: what the answers of questions are written with."""

import math
import statistics
from collections.abc import Collection, Sequence

from scipy.stats import spearmanr

from rankscope.figures import power


def spread(values: Sequence[float], form: str = ".3g") -> str:
    """The median and the range of numbers; the range is left out where it does not show.

    >>> spread([1.0, 3.0, 2.0], ".1f"), spread([0.5, 0.5]), spread([])
    ('2.0 (1.0–3.0)', '0.5', '–')
    """
    return _shown([f"{value:{form}}" for value in _ordered(values)])


def spread_of_logs(values: Sequence[float]) -> str:
    """The median and the range of numbers that are given as log10, at any scale.

    >>> spread_of_logs([-1.0, -400.0, -2.0])
    '0.01 (1.0e-400–0.1)'
    """
    return _shown([power(value) for value in _ordered(values)])


def _ordered(values: Sequence[float]) -> list[float]:
    return [min(values), statistics.median(values), max(values)] if values else []


def _shown(texts: list[str]) -> str:
    """A text of (least, median, largest)."""
    if not texts:
        return "–"
    low, middle, high = texts
    return middle if low == high else f"{middle} ({low}–{high})"


def unanimous(outcomes: Collection[bool]) -> bool | None:
    """True if all outcomes are true, False if none is; None where seeds disagree, or there are none.

    >>> unanimous([True, True]), unanimous([False]), unanimous([True, False]), unanimous([])
    (True, False, None, None)
    """
    distinct = {*outcomes}
    return distinct.pop() if len(distinct) == 1 else None


def holm(p_values: Sequence[float], level: float = 0.05) -> list[bool]:
    """Which of several p-values are small by Holm's correction: the chance that any is so by chance is below `level`.

    >>> holm([0.04, 0.01, 0.03]), holm([0.04, 0.01, 0.02])
    ([False, True, False], [True, True, True])
    """
    small = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] > level / (len(p_values) - rank):
            break
        small[index] = True
    return small


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation; NaN where one of the two does not vary, or there are fewer than three pairs.

    >>> rank_correlation([1, 2, 3], [9, 4, 1]), rank_correlation([1, 1, 1], [1, 2, 3])
    (-1.0, nan)
    """
    if len(a) < 3 or len({*a}) < 2 or len({*b}) < 2:
        return math.nan
    return round(float(spearmanr(a, b)[0]), 12)  # without the last digits, in which equal ranks may differ

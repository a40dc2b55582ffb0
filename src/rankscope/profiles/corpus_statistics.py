"""Statistics over excerpts, each of all of them at once.

Rows that come excerpt by excerpt are kept on disk; what is computed here takes a few (variant, metric, layer,
head) at a time, so that memory does not grow with a corpus, and quantiles are exact.
"""

import numpy as np

from rankscope.shapes import Bool, Float

QUANTILES = {"q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}

Numbers = Float[np.ndarray, "row sample"]
Column = Float[np.ndarray, " row"]


def statistics_of(numbers: Numbers, *, logs: bool = False) -> dict[str, Column]:
    """Count, mean, standard deviation `sd` (with n - 1) and range of the finite numbers in each row, NaN
    where there are none (of fewer than two, for `sd`), and the quantiles of all that are not NaN."""
    there = np.isfinite(numbers)
    count = there.sum(1).astype(float)
    some = np.maximum(count, 1.0)[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        # Scaled before they are summed: the mean of numbers in range is in range.
        mean = (np.where(there, numbers, 0.0) / some).sum(1)
        mean += (np.where(there, numbers - mean[:, None], 0.0) / some).sum(1)  # what rounding left of it
        squares = np.square(np.where(there, numbers - mean[:, None], 0.0)).sum(1)
        sd = np.sqrt(np.where(count > 1, squares, np.nan) / np.maximum(count - 1, 1.0))
    known = {
        "mean": mean,
        "least": np.where(there, numbers, np.inf).min(1, initial=np.inf),
        "most": np.where(there, numbers, -np.inf).max(1, initial=-np.inf),
    }
    ordered = np.sort(numbers, axis=1)  # NaN last
    present = (~np.isnan(ordered)).sum(1)
    return {
        "count": count,
        "sd": sd,
        **{name: np.where(count > 0, column, np.nan) for name, column in known.items()},
        **{name: quantile(ordered, present, share, logs=logs) for name, share in QUANTILES.items()},
    }


def quantile(ordered: Numbers, count: np.ndarray, share: float, *, logs: bool = False) -> Column:
    """The quantile of each row's first `count` numbers, which are in order: between neighbours, linear.

    Where a neighbour is infinite there is no between, and the lower one is taken. Of logs, -inf is that of an
    exact zero: at t of the way from it to the log of v lies the log of t v, as among the values themselves.
    """
    if not ordered.shape[1]:
        return np.full(len(ordered), np.nan)
    last = np.maximum(count - 1, 0)
    place = share * last
    low = np.floor(place).astype(int)
    rows = np.arange(len(ordered))
    below, above = ordered[rows, low], ordered[rows, np.minimum(low + 1, last)]
    part = place - low
    exact: Bool[np.ndarray, " row"] = (part == 0) | (below == above)
    exact |= ~np.isfinite(below) | ~np.isfinite(above)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        found = np.where(exact, below, below * (1 - part) + above * part)
        if logs:
            after_zero = np.isneginf(below) & np.isfinite(above) & (part > 0)
            found = np.where(after_zero, above + np.log10(part), found)
    return np.where(count > 0, found, np.nan)

"""Count, mean, standard deviation and range of many columns at once, chunk after chunk.

Chan, Golub and LeVeque 1979: with n, m, M = sum (x - m)^2 of what came before and n', m', M' of a chunk,

    m'' = m + (m' - m) n' / (n + n'),    M'' = M + M' + (m' - m)^2 n n' / (n + n').
"""

from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Float

Rows = Float[np.ndarray, " row"]


@dataclass
class Moments:
    """Of the finite numbers in each column; the others are left out, and `count` says how many are in."""

    count: Rows
    mean: Rows
    squares: Rows
    """Sum of squared distances from the mean."""
    least: Rows
    most: Rows

    @classmethod
    def empty(cls, rows: int) -> "Moments":
        """Of nothing yet."""
        zeros = np.zeros(rows)
        return cls(zeros, zeros.copy(), zeros.copy(), np.full(rows, np.inf), np.full(rows, -np.inf))

    def add(self, chunk: Float[np.ndarray, "sample row"]) -> None:
        """Take a chunk in."""
        there = np.isfinite(chunk)
        count = there.sum(0).astype(float)
        some = np.maximum(count, 1.0)
        total = np.maximum(self.count + count, 1.0)
        with np.errstate(over="ignore", invalid="ignore"):
            # Scaled before they are summed: the mean of numbers in range is in range.
            mean = (np.where(there, chunk, 0.0) / some).sum(0)
            away = np.where(there, chunk - mean, 0.0)
            mean = mean + away.sum(0) / some  # what rounding left in the first pass
            squares = np.square(np.where(there, chunk - mean, 0.0)).sum(0)
            step = np.where(count > 0, mean - self.mean, 0.0)
            self.squares = self.squares + squares + np.square(step) * (self.count * count / total)
            self.mean = self.mean + step * (count / total)
        self.count = self.count + count
        self.least = np.minimum(self.least, np.where(there, chunk, np.inf).min(0, initial=np.inf))
        self.most = np.maximum(self.most, np.where(there, chunk, -np.inf).max(0, initial=-np.inf))

    def sd(self) -> Rows:
        """The standard deviation of a sample, with n - 1; NaN of fewer than two numbers."""
        with np.errstate(invalid="ignore"):
            return np.sqrt(np.where(self.count > 1, self.squares, np.nan) / np.maximum(self.count - 1, 1.0))

    def known(self, column: Rows) -> Rows:
        """The column, NaN where there was no finite number."""
        return np.where(self.count > 0, column, np.nan)

    def arrays(self, prefix: str) -> dict[str, np.ndarray]:
        """For a file."""
        return {f"{prefix}_{field.name}": getattr(self, field.name) for field in fields(self)}

    @classmethod
    def of_arrays(cls, arrays: dict[str, np.ndarray], prefix: str) -> "Moments":
        """Out of a file."""
        return cls(**{field.name: arrays[f"{prefix}_{field.name}"] for field in fields(cls)})


def quantile(ordered: Float[np.ndarray, "sample row"], count: Rows, share: float) -> Rows:
    """The quantile of each column's first `count` numbers, which are in order: between neighbours, linear.

    Where a neighbour is infinite there is no between, and the lower one is taken.
    """
    if not len(ordered):
        return np.full(len(count), np.nan)
    place = share * np.maximum(count - 1, 0)
    low = np.floor(place).astype(int)
    high = np.minimum(low + 1, np.maximum(count - 1, 0).astype(int))
    columns = np.arange(len(count))
    below, above = ordered[low, columns], ordered[high, columns]
    part = place - low
    with np.errstate(invalid="ignore", over="ignore"):
        between = below * (1 - part) + above * part
    exact = (part == 0) | (below == above) | ~np.isfinite(below) | ~np.isfinite(above)
    return np.where(count > 0, np.where(exact, below, between), np.nan)

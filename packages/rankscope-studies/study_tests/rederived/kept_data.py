"""What the re-derivations from kept raw rows share: tables as they lie beside the pages, medians, ranks, chance.

Nothing here is the library's: rows are read by polars and counted by code of their own.
"""

import statistics
from collections.abc import Iterable, Sequence
from itertools import permutations
from pathlib import Path

import polars as pl

ROOT = Path(__file__).parents[4]
DOCS = Path(__file__).parents[2] / "docs"
KEPT = DOCS / "studies" / "data"
REMEDIES = DOCS / "reproduction" / "full" / "remedies"


def rows(study: str, table: str) -> pl.DataFrame:
    """A table of raw rows beside the page of a study."""
    return pl.read_parquet(KEPT / study / f"{table}.parquet")


def column(table: pl.DataFrame, name: str = "value", order: str = "seed") -> list[float]:
    """Numbers of a column, by seed."""
    return [float(value) for value in table.sort(order)[name].to_list()]


def spread(values: Iterable[float]) -> tuple[float, float, float]:
    """(median, least, largest)."""
    listed = [*values]
    return statistics.median(listed), min(listed), max(listed)


def near(found: Sequence[float], said: Sequence[float], within: float) -> bool:
    """Whether numbers are as said, each within a distance."""
    return len(found) == len(said) and all(abs(a - b) <= within for a, b in zip(found, said, strict=True))


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 0, the mean of them where values are equal."""
    return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's: Pearson's correlation of ranks."""
    x, y = ranks([*a]), ranks([*b])
    mean = (len(x) - 1) / 2
    dot = sum((p - mean) * (q - mean) for p, q in zip(x, y, strict=True))
    return dot / float((sum((p - mean) ** 2 for p in x) * sum((q - mean) ** 2 for q in y)) ** 0.5)


def by_chance(a: Sequence[float], b: Sequence[float]) -> float:
    """The share of all orders of b that have as large a rank correlation with a, of either sign: its exact p."""
    found = abs(rank_correlation(a, b)) - 1e-9
    orders = [abs(rank_correlation(a, order)) >= found for order in permutations(b)]
    return sum(orders) / len(orders)

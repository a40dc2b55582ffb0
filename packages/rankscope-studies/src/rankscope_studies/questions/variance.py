"""What explains an accuracy: shares of its variance over a balanced grid, and R² of factors alone and beyond others."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl


def logits(accuracies: pl.Series) -> Any:
    """log(p / (1 - p)), with p kept between 0.001 and 0.999: an accuracy of all or none has no logit."""
    p = np.clip(accuracies.to_numpy(), 1e-3, 1 - 1e-3)
    return np.log(p / (1 - p))


def on_grid(sets: pl.DataFrame) -> pl.DataFrame:
    """The sets of those numbers of paths that every length has, drawn equally often."""
    lengths, most = sets["length"].n_unique(), int(sets["repeat"].max() or 0) + 1  # type: ignore[arg-type]
    counts = sets.group_by("number", "length").len().filter(pl.col("len") == most)
    numbers = counts.group_by("number").len().filter(pl.col("len") == lengths)["number"]
    return sets.filter(pl.col("number").is_in(numbers.implode()))


def grid_shares(sets: pl.DataFrame, reader: str) -> dict[str, float]:
    """Shares of the sum of squares of logit accuracy over a grid of numbers and lengths: number, length, interaction,
    and draws (which paths they were). Empty where the grid is not whole, or nothing varies."""
    numbers, lengths = sorted({*sets["number"]}), sorted({*sets["length"]})
    cells = [[logits(sets.filter(number=count, length=length)[reader]) for length in lengths] for count in numbers]
    draws = {len(cell) for row in cells for cell in row}
    if len(draws) != 1 or min(len(numbers), len(lengths)) < 2:
        return {}
    table = np.array(cells)  # [number, length, draw]
    means = table.mean(2)
    by_number, by_length, mean = means.mean(1, keepdims=True), means.mean(0, keepdims=True), means.mean()
    total = float(((table - mean) ** 2).sum())
    if total < 1e-12:
        return {}
    per_cell = table.shape[2]
    parts = {
        "number": per_cell * len(lengths) * ((by_number - mean) ** 2).sum(),
        "length": per_cell * len(numbers) * ((by_length - mean) ** 2).sum(),
        "interaction": per_cell * ((means - by_number - by_length + mean) ** 2).sum(),
        "draws": ((table - means[..., None]) ** 2).sum(),
    }
    return {name: float(part) / total for name, part in parts.items()}


def regression(columns: Mapping[str, Any], y: Any) -> dict[str, dict[str, float]]:
    """R² of each factor alone, and by how much R² of all factors falls without it.

    Args:
        columns: A factor's values, or its columns `[case, column]` where one line does not code it.
        y: What is to be explained.
    """
    together = r_squared([*columns.values()], y)
    alone = {name: r_squared([column], y) for name, column in columns.items()}
    beyond = {
        name: together - r_squared([column for factor, column in columns.items() if factor != name], y)
        for name in columns
    }
    return {"alone": alone, "beyond": beyond, "together": {"all": together}}


def one_hot(values: Any) -> Any:
    """Columns `[case, value]` that are 1 where a case has the value: a factor of any shape, not a line."""
    return (values[:, None] == np.unique(values)[1:]).astype(float)


def r_squared(columns: Sequence[Any], y: Any) -> float:
    """R² of a linear regression with an intercept; 0 where y does not vary."""
    X = np.column_stack([np.ones_like(y), *columns])
    size = np.abs(X).max(0)
    X[:, 1:] -= X[:, 1:].mean(0)
    varying = np.abs(X).max(0)
    X /= np.where(varying > 1e-12 * size, varying, np.inf)  # of one size; what does not vary is left out
    errors = y - X @ np.linalg.lstsq(X, y, rcond=None)[0]
    total = float(((y - y.mean()) ** 2).sum())
    return 1 - float((errors**2).sum()) / total if total > 0 else 0.0

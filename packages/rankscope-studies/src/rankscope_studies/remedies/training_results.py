"""What is read of trainings: a tidy table of `remedy, setting, depth, seed, quantity, value, refused`.

It may be absent or hold a part of all remedies, settings, depths and seeds: what is not there is None, and no
row of the table of remedies is left out for it. Residuals and gradients in it are log10.
"""

import statistics
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import polars as pl

from rankscope_studies.remedies.at_initialisation import DepthReached
from rankscope_studies.trial import NONE, SCHEMA, Trial, TrialSizes

SETTINGS = ("post", "pre", "no skips", "images")
MARGIN = 0.5  # Nats that a network which learns is below one that knows how frequent labels are and nothing else
RATE = TrialSizes().lr  # Of learning, where nothing else is said
PRICE = "seconds_per_step"
COSTS = {"remedy": pl.String, "setting": pl.String, "depth": pl.Int64, "ratio": pl.Float64}


class SeedSpread(NamedTuple):
    """The median of several seeds, and their ends."""

    median: float
    low: float
    high: float
    seeds: int

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "SeedSpread":
        """The spread of at least one number."""
        return cls(statistics.median(numbers), min(numbers), max(numbers), len(numbers))

    def said(self, form: str = ".3f") -> str:
        """The median, with the range where seeds differ."""
        middle, low, high = (f"{value:{form}}" for value in self[:3])
        between = " to " if self.low < 0 else "–"
        return middle if low == high else f"{middle} ({low}{between}{high})"


def completed(table: pl.DataFrame | None) -> pl.DataFrame:
    """A table of trainings with all columns; an absent one is empty."""
    if table is None:
        return pl.DataFrame(schema=SCHEMA)
    missing = [pl.lit(None, kind).alias(name) for name, kind in SCHEMA.items() if name not in table.columns]
    return table.with_columns(missing).select(*SCHEMA).cast(SCHEMA)  # type: ignore[arg-type]


def values(table: pl.DataFrame, remedy: str, setting: str, depth: int, quantity: str) -> dict[int, float]:
    """By seed, what is known."""
    rows = table.filter(remedy=remedy, setting=setting, depth=depth, quantity=quantity)
    known = rows.filter(pl.col("value").is_not_null() & pl.col("value").is_not_nan())
    return dict(known.select("seed", "value").iter_rows())


def spread_of(values: Iterable[float]) -> SeedSpread | None:
    """Median and ends of numbers; None where there are none."""
    numbers = list(values)
    return SeedSpread.of(numbers) if numbers else None


def spread(table: pl.DataFrame, remedy: str, setting: str, depth: int, quantity: str) -> SeedSpread | None:
    """Median and ends over seeds of a quantity of trained networks; None where nothing is known."""
    return spread_of(values(table, remedy, setting, depth, quantity).values())


def depths(table: pl.DataFrame, setting: str, remedy: str | None = None) -> list[int]:
    """At which it was trained, in order: those with some number."""
    rows = table.filter(pl.col("value").is_not_null(), setting=setting)
    rows = rows if remedy is None else rows.filter(remedy=remedy)
    return sorted(rows["depth"].unique().to_list())


def settings(table: pl.DataFrame) -> list[str]:
    """The settings in which something was trained, in order."""
    return [setting for setting in SETTINGS if depths(table, setting)]


def learns(table: pl.DataFrame, remedy: str, setting: str) -> DepthReached | None:
    """The deepest networks that learn: from the shallowest on, up to the first depth at which a seed does not
    get `MARGIN` below the loss of who does not look, or to the first at which it was not trained. None where
    that is the shallowest."""
    deepest = 0
    for depth in depths(table, setting):
        learnt = at(table, remedy, setting, depth)
        if learnt is None:
            break
        if not learnt:
            return DepthReached(deepest, False)
        deepest = depth
    return DepthReached(deepest, True) if deepest else None


def at(table: pl.DataFrame, remedy: str, setting: str, depth: int) -> bool | None:
    """Whether networks of this depth learn, with every seed; None where they were not trained."""
    losses, lost = values(table, remedy, setting, depth, "loss"), diverged(table, remedy, setting, depth)
    if not losses and not lost:
        return None
    return not lost and max(losses.values()) <= blind(setting) - MARGIN


@cache
def blind(setting: str) -> float:
    """The loss of who knows how frequent labels are, and does not look at the inputs."""
    return Trial(NONE, setting, 1, (0,), TrialSizes()).task.blind


def refusal(table: pl.DataFrame, remedy: str, setting: str) -> str | None:
    """Why it was not trained there at all."""
    rows = table.filter(pl.col("quantity").is_null(), remedy=remedy, setting=setting)
    return next(iter(rows["refused"].drop_nulls()), None)


def diverged(table: pl.DataFrame, remedy: str, setting: str, depth: int) -> int:
    """The number of seeds that diverged there."""
    return int(sum(values(table, remedy, setting, depth, "diverged").values()))


def parameters_added(table: pl.DataFrame, remedy: str) -> float | None:
    """How many more parameters a network has with the remedy, at most."""
    return max(table.filter(remedy=remedy, quantity="parameters_added")["value"].drop_nulls(), default=None)


def priced(costs: pl.DataFrame | None) -> pl.DataFrame:
    """Costs as `remedy, setting, depth, ratio`, whether they come with ratios or as seconds per step in a
    table like that of trainings; an absent one is empty."""
    if costs is None:
        return pl.DataFrame(schema=COSTS)
    if "ratio" not in costs.columns:
        rows = costs.filter(pl.col("value").is_not_null(), quantity=PRICE)
        keys = ["setting", "depth", "seed"]
        plain = rows.filter(remedy=NONE).select(*keys, pl.col("value").alias("plain"))
        both = rows.join(plain, on=keys, nulls_equal=True, maintain_order="left")
        costs = both.with_columns(ratio=pl.col("value") / pl.col("plain"))
    return costs.select(*COSTS).cast(COSTS)  # type: ignore[arg-type]


def price(costs: pl.DataFrame, remedy: str) -> SeedSpread | None:
    """Time per step as a ratio to that of no remedy, over all that were timed."""
    return spread_of(costs.filter(remedy=remedy)["ratio"].drop_nulls())


def path_length(table: pl.DataFrame, remedy: str, setting: str, depth: int, seed: int) -> float | None:
    """How many heads a path has on the average, weighed by its share of the output."""
    known_share = pl.col("quantity").str.contains(r"^path_share_\d+$") & pl.col("value").is_not_null()
    rows = table.filter(known_share, remedy=remedy, setting=setting, depth=depth, seed=seed)
    if rows.is_empty():
        return None
    return float((rows["quantity"].str.extract(r"(\d+)$").cast(pl.Float64) * rows["value"]).sum())

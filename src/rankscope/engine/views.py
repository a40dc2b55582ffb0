"""What figures and pages show of a sweep: one metric of every cell, by layer and at the last layer.

The value of a cell is the mean over its samples (and heads), of logarithms the geometric one. How much a factor
matters is found from the ranks of cells, the least first: the share of the variance of ranks that the levels of the
factor account for, alone (epsilon squared, about 0 for a factor that does nothing, however many levels it has).
Ranks, because residuals may lie billions of decades apart.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl

from rankscope.engine import factors
from rankscope.figures import power

MOST_LEVELS, BINS = 9, 5  # a factor of more numbers than these levels has them gathered into bins of equal size
WIDE = 2.0  # decades from which on the axis is logarithmic
NEEDED = {"sweep": {"cell", "layer", "metric", "value", "log10", "below_floor"}, "cells": {"cell", "reason", "seconds"}}


@dataclass(frozen=True)
class Levels:
    """The levels of a factor, in order, and which of them each cell has."""

    factor: str
    labels: list[str]
    of: np.ndarray  # [cell]: the index of its level
    ordered: bool  # True if the levels are numbers


@dataclass(frozen=True)
class Curve:
    """The median of cells by layer, and the range of them."""

    panel: int
    colour: int
    centre: np.ndarray
    low: np.ndarray
    high: np.ndarray
    cells: int


@dataclass(frozen=True, eq=False)
class SweepView:
    """One metric of a sweep."""

    metric: str
    varied: list[str]  # Factors that differ between the cells that were measured
    cells: pl.DataFrame
    """A row for each cell that was measured: `cell`, factors, `seconds`; and at its last layer `layer`,
    `value`, `log10`, `noise`."""
    layers: pl.DataFrame  # `cell`, `layer`, `value`, `log10`

    @cached_property
    def log(self) -> bool:
        """True if values span so many decades that an axis of powers shows more."""
        known = self.layers["log10"].to_numpy()
        known = known[np.isfinite(known)]
        return bool(len(known)) and float(np.ptp(known)) > WIDE

    @property
    def column(self) -> str:
        """The column of `cells` and `layers` that figures draw."""
        return "log10" if self.log else "value"

    def shown(self, number: float) -> str:
        """A number of `column` as people read it."""
        return power(float(number)) if self.log else f"{number:.4g}"

    @cached_property
    def ends(self) -> np.ndarray:
        """[cell]: what figures draw of the last layer."""
        return self.cells[self.column].to_numpy()

    @cached_property
    def effects(self) -> dict[str, float]:
        """By factor, its share of the variance of ranks at the last layer, the largest first."""
        shares = {factor: self._effect(factor) for factor in self.varied}
        return dict(sorted(shares.items(), key=lambda effect: -effect[1]))

    @cached_property
    def arranged(self) -> tuple[str | None, str | None]:
        """(the factor that colours lines, the one that has panels): what matters most; depths apart."""
        names = [name for name in self.effects if name != "depth"]
        names += ["depth"] if "depth" in self.varied else []
        if not names:
            return None, None
        panel = "depth" if "depth" in names[1:] else names[1] if len(names) > 1 else None
        return names[0], panel

    def levels(self, factor: str | None) -> Levels:
        """The levels of a factor; for None, one level that all cells have."""
        if factor is None:
            return Levels("", [""], np.zeros(len(self.cells), int), False)
        column = self.cells[factor]
        known = column.drop_nulls().unique().sort()
        if column.dtype.is_numeric() and len(known) > MOST_LEVELS:
            cuts = np.unique(np.quantile(column.drop_nulls().to_numpy(), np.linspace(0, 1, BINS + 1)))
            labels = [f"{low:.3g}–{high:.3g}" for low, high in pairwise(cuts)]
            index = {value: int(np.searchsorted(cuts[1:-1], value, side="right")) for value in known}
        else:
            labels = [factors.level_name(value) for value in known]
            index = {value: level for level, value in enumerate(known)}
        of = np.array([index.get(value, len(labels)) for value in column], int)
        if column.null_count():
            labels.append("not given")
        return Levels(factor, labels, of, column.dtype.is_numeric())

    def curves(self, colour: str | None, panel: str | None) -> list[Curve]:
        """A curve for each colour in each panel, over the layers that all of its cells have."""
        levels = {"colour": self.levels(colour).of, "panel": self.levels(panel).of}
        counted = pl.len().over("colour", "panel").alias("cells")
        marks = pl.DataFrame({"cell": self.cells["cell"], **levels}).with_columns(counted)
        value = pl.col(self.column)
        means = (
            self.layers.join(marks, on="cell")
            .filter(value.is_finite())
            .group_by("panel", "colour", "cells", "layer")
            .agg(value.median().alias("centre"), value.min().alias("low"), value.max().alias("high"), pl.len())
            .filter(pl.col("len") == pl.col("cells"))
        )
        curves: list[Curve] = []
        groups: Any = means.sort("panel", "colour", "layer").group_by(["panel", "colour"], maintain_order=True)
        for (panel_level, colour_level), part in groups:
            lines = np.full((3, part["layer"].max() + 1), np.nan)
            lines[:, part["layer"].to_numpy()] = part.select("centre", "low", "high").to_numpy().T
            centre, low, high = lines
            curves.append(Curve(panel_level, colour_level, centre, low, high, part["cells"][0]))
        return curves

    def described(self, row: int) -> str:
        """The cell of a row by the factors that differ: depth 6, skip 0.5."""
        values = {name: self.cells[name][row] for name in self.varied if self.cells[name][row] is not None}
        return factors.described(values, defaults={}) if values else ""

    def _effect(self, factor: str) -> float:
        """Epsilon squared of ranks: 1 - (variance within levels) / (variance of all cells)."""
        known = ~np.isnan(self.ends)
        of = self.levels(factor).of[known]
        ranks = pl.Series(self.ends[known]).rank().to_numpy()
        groups = [ranks[of == level] for level in np.unique(of)]
        total = float(((ranks - ranks.mean()) ** 2).sum()) if len(ranks) else 0.0
        free = len(ranks) - len(groups)
        if total <= 0.0 or free <= 0:
            return 0.0
        within = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
        return max(0.0, 1.0 - (within / free) / (total / (len(ranks) - 1)))


def view_of(rows: pl.DataFrame, cells: pl.DataFrame, metric: str, varied: list[str]) -> SweepView:
    """A metric of a sweep, of its rows in the table `sweep`, the table `cells` and the factors that differ."""
    means = rows.group_by("cell", "layer", maintain_order=True).agg(
        pl.col("value").mean(),
        pl.col("log10").mean(),
        (pl.col("below_floor") & pl.col("value").is_not_nan()).any().alias("noise"),
    )
    last = means.filter(pl.col("layer") == pl.col("layer").max().over("cell"))
    measured = cells.join(last, on="cell", how="inner").sort("cell")
    return SweepView(metric, [factor for factor in varied if measured[factor].n_unique() > 1], measured, means)

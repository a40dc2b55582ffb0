"""What figures and pages show of a sweep: one metric of every cell, by layer and at the last layer.

A cell's number is the mean over its samples (and heads), of logarithms the geometric one. How much a factor
matters is found with cells in order, the least first: the share of the variance of their places that its
levels account for, alone (epsilon squared of ranks, about 0 for a factor that does nothing, however many
levels it has). Places, because residuals may lie billions of decades apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl

from rankscope.errors import FileError, one_of
from rankscope.runs import Run

LEVELS = 9
"""Up to so many levels stand for themselves; of more, numbers are gathered into `BINS` of equal size."""
BINS = 5
WIDE = 2.0
"""Decades from which on the axis is logarithmic."""


@dataclass(frozen=True)
class Levels:
    """The levels of a factor, in order: of each cell which it has."""

    factor: str
    labels: list[str]
    of: np.ndarray
    """[cell]: the place of its level."""
    ordered: bool
    """Whether they are numbers."""


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
    varied: list[str]
    """Factors that differ between the cells that were measured."""
    cells: pl.DataFrame
    """A row for each cell that was measured: `cell`, factors, `seconds`; and at its last layer `layer`,
    `value`, `log10`, `noise`."""
    layers: pl.DataFrame
    """`cell`, `layer`, `value`, `log10`."""

    @cached_property
    def log(self) -> bool:
        """Whether an axis of powers shows more."""
        known = self.layers["log10"].to_numpy()
        known = known[np.isfinite(known)]
        return bool(len(known)) and float(np.ptp(known)) > WIDE

    @property
    def column(self) -> str:
        """What is drawn."""
        return "log10" if self.log else "value"

    @cached_property
    def ends(self) -> np.ndarray:
        """[cell]: at the last layer."""
        return self.cells[self.column].to_numpy()

    @cached_property
    def effects(self) -> dict[str, float]:
        """Shares of the order of cells at the last layer by factor, the largest first."""
        found = {factor: self._effect(factor) for factor in self.varied}
        return dict(sorted(found.items(), key=lambda each: -each[1]))

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
        """Of a factor; of none the one level that all cells have."""
        if factor is None:
            return Levels("", [""], np.zeros(len(self.cells), int), False)
        column = self.cells[factor]
        known = column.drop_nulls().unique().sort()
        if column.dtype.is_numeric() and len(known) > LEVELS:
            cuts = np.unique(np.quantile(column.drop_nulls().to_numpy(), np.linspace(0, 1, BINS + 1)))
            labels = [f"{low:.3g}–{high:.3g}" for low, high in pairwise(cuts)]
            places = [
                len(labels) if value is None else int(np.searchsorted(cuts[1:-1], value, side="right"))
                for value in column
            ]
        else:
            labels = [_word(value) for value in known]
            at = {value: place for place, value in enumerate(known)}
            places = [at.get(value, len(labels)) for value in column]
        if column.null_count():
            labels.append("not given")
        return Levels(factor, labels, np.array(places, int), column.dtype.is_numeric())

    def curves(self, colour: str | None, panel: str | None) -> list[Curve]:
        """A curve for each colour in each panel, over the layers that all of its cells have."""
        inks, places = self.levels(colour), self.levels(panel)
        marks = pl.DataFrame({"cell": self.cells["cell"], "colour": inks.of, "panel": places.of})
        known = self.layers.join(marks, on="cell").filter(pl.col(self.column).is_finite())
        number = marks.group_by("colour", "panel").len("cells")
        drawn = pl.col(self.column)
        means = known.group_by("panel", "colour", "layer").agg(
            drawn.median().alias("centre"), drawn.min().alias("low"), drawn.max().alias("high"),
            pl.len().alias("here"),
        )  # fmt: skip
        means = means.join(number, on=["colour", "panel"]).filter(pl.col("here") == pl.col("cells"))
        found: list[Curve] = []
        groups: Any = means.sort("layer").group_by(["panel", "colour"], maintain_order=True)
        for (place, ink), part in groups:
            size = part["layer"].max() + 1
            lines = np.full((3, size), np.nan)
            lines[:, part["layer"].to_numpy()] = part.select("centre", "low", "high").to_numpy().T
            centre, low, high = lines
            found.append(Curve(place, ink, centre, low, high, part["cells"][0]))
        return sorted(found, key=lambda each: (each.panel, each.colour))

    def _effect(self, factor: str) -> float:
        there = ~np.isnan(self.ends)
        of = self.levels(factor).of[there]
        ends = pl.Series(self.ends[there]).rank().to_numpy()
        groups = [ends[of == level] for level in np.unique(of)]
        whole = float(((ends - ends.mean()) ** 2).sum()) if len(ends) else 0.0
        free = len(ends) - len(groups)
        if whole <= 0.0 or free <= 0:
            return 0.0
        within = sum(float(((each - each.mean()) ** 2).sum()) for each in groups)
        return max(0.0, 1.0 - (within / free) / (whole / (len(ends) - 1)))


def view_of(run: Run, metric: str | None = None) -> SweepView:
    """A metric of the sweep in a run folder; the first that was asked for where none is named."""
    rows, cells = run.table("sweep"), run.table("cells")
    about = run.manifests["sweep"].more if "sweep" in run.manifests else {}
    missing = {"cell", "layer", "metric", "value", "log10", "below_floor"} - set(rows.columns)
    missing |= {"cell", "reason", "seconds", *about.get("varied", [])} - set(cells.columns)
    if missing or "varied" not in about:
        raise FileError(
            f"{run.folder} must hold a sweep as `rankscope sweep` writes it; its tables lack "
            f"{', '.join(sorted(missing)) or 'their manifest'}: run it again"
        )
    metrics = list(about.get("asked", {}).get("metrics", [])) or rows["metric"].unique().to_list()
    name = metrics[0] if metric is None else metric
    if name not in metrics:
        raise FileError(one_of(f"a metric of {run.folder}", name, metrics), subject="metric")
    means = (
        rows.filter(metric=name)
        .group_by("cell", "layer", maintain_order=True)
        .agg(pl.col("value").mean(), pl.col("log10").mean(), pl.col("below_floor").any().alias("noise"))
    )
    last = means.filter(pl.col("layer") == pl.col("layer").max().over("cell"))
    found = cells.join(last, on="cell", how="inner").sort("cell")
    varied = [factor for factor in about["varied"] if found[factor].n_unique() > 1]
    return SweepView(name, varied, found, means)


def metrics_of(run: Run) -> list[str]:
    """Those that were asked for, in that order."""
    about: dict[str, Any] = run.manifests["sweep"].more if "sweep" in run.manifests else {}
    return list(about.get("asked", {}).get("metrics", []))


def described(view: SweepView, row: int, without: Sequence[str] = ()) -> str:
    """A cell by the factors that differ: depth 6, skip 0.5."""
    values = {name: view.cells[name][row] for name in view.varied if name not in without}
    return ", ".join(f"{name} {_word(value)}" for name, value in values.items() if value is not None)


def _word(value: Any) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)

"""What figures and pages show of a sweep: one metric of every cell, by layer and at the last layer.

`sweep_curves_chart` draws it by layer in small multiples, `sweep_levels_chart` at the last layer by the levels of each
factor. `Sweep.plot` draws both below each other, the report each on its own.

The value of a cell is the mean over its samples (and heads), of logarithms the geometric one. How much a factor
matters is found from the ranks of cells, the least first: the share of the variance of ranks that the levels of the
factor account for, alone (epsilon squared, about 0 for a factor that does nothing, however many levels it has).
Ranks, because residuals may lie billions of decades apart.

Cells that are chosen by number or by their factors become a `Profile` that can be compared: `runs/study:17` is cell 17
of the run `runs/study`; `runs/study:depth=6,skip=0.5` are the cells with these factors. `compare` asks `choice_in`
whether an argument names cells, and `profile_of` for their numbers.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from rankscope import figures as fig
from rankscope.engine.spec import described, level_name
from rankscope.errors import SweepError, require, require_one_of
from rankscope.figures import evenly, power
from rankscope.profiles import SCHEMA, Profile, metric_title
from rankscope.runs import Network, Run, read
from rankscope.trainings import ends

MOST_LEVELS, BINS = 9, 5  # a factor of more numbers than these levels has them gathered into bins of equal size
MOST_CHOSEN = 12  # cells that are compared side by side
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
            labels = [level_name(value) for value in known]
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
        return described(values, defaults={}) if values else ""

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


def choice_in(argument: str) -> tuple[Path, str] | None:
    """Split `RUN:CHOICE` at the first colon before which there is a sweep's folder; None where there is none.

    Both may hold colons: `C:/runs/study:mask=window:2` is the choice `mask=window:2`.
    """
    for at, character in enumerate(argument):
        if character == ":" and (Path(argument[:at]) / "sweep.parquet").is_file():
            return Path(argument[:at]), argument[at + 1 :]
    return None


def profile_of(folder: Path, choice: str) -> Profile:
    """The readings of the chosen cells; each cell is a variant, named by its number and varied factors."""
    run = read(folder)
    cells = chosen_cells(run, choice)
    varied = [name for name in run.manifests["sweep"].more.get("varied", []) if name in cells.columns]
    names = {
        row["cell"]: f"{folder.name}:{row['cell']} ({described({name: row[name] for name in varied})})"
        for row in cells.iter_rows(named=True)
    }
    rows = run.table("sweep").filter(pl.col("cell").is_in(list(names)))
    measured = set(rows["cell"])
    if missing := [cell for cell in names if cell not in measured]:
        why = cells.filter(cell=missing[0])["reason"][0] or "it is not done yet"
        raise SweepError(f"cell {missing[0]} of {folder} must have been measured; it was not: {why}", subject="cell")
    variant = pl.col("cell").replace_strict(names, return_dtype=pl.String).alias("variant")
    table = rows.with_columns(variant).select(list(SCHEMA)).cast(pl.Schema(SCHEMA))
    metrics = tuple(table["metric"].unique(maintain_order=True))
    checks = {"arithmetic_asked": run.manifests["sweep"].more["asked"]["arithmetic"]}
    networks = [
        Network(variant=name, arithmetic=arithmetic, metrics=metrics, checks=checks)
        for name, arithmetic in table.select("variant", "arithmetic").unique(maintain_order=True).rows()
    ]
    return Profile(table, run.manifests["sweep"].adding(networks=tuple(networks)))


def chosen_cells(run: Run, choice: str) -> pl.DataFrame:
    """The rows of the table of cells that a choice (a number, or factors with their values) selects."""
    cells = run.table("cells")
    total = len(cells)
    for name, value in parse_choice(choice, cells).items():
        require_one_of("a factor of this sweep", name, cells.columns, SweepError, name)
        cells = cells.filter(_equals(cells.schema[name].is_numeric(), pl.col(name), value))
    chosen = f"{choice!r} chooses {len(cells)} of {total} in {run.folder}"
    sentence = f"1 to {MOST_CHOSEN} cells must be chosen, by number or as depth=6,skip=0.5; {chosen}"
    require(1 <= len(cells) <= MOST_CHOSEN, sentence, SweepError, "choice")
    return cells


def parse_choice(choice: str, cells: pl.DataFrame) -> dict[str, str]:
    """The factors that a choice asks for, by name; a number alone is the factor `cell`.

    A value may hold commas, as that of a remedy with two options does: what follows a comma belongs to the
    value before it if some cell has such a value.

    >>> cells = pl.DataFrame({"remedy": ["shaped:alpha=1,beta=2", "none"], "depth": [6, 6]})
    >>> parse_choice("remedy=shaped:alpha=1,beta=2,depth=6", cells)
    {'remedy': 'shaped:alpha=1,beta=2', 'depth': '6'}
    >>> parse_choice("17", cells)
    {'cell': '17'}
    """
    if "=" not in choice:
        return {"cell": choice.strip()}
    wanted: dict[str, str] = {}
    factor = ""
    for part in choice.split(","):
        longer = f"{wanted.get(factor, '')},{part.strip()}"
        values: Iterable[str] = cells[factor].cast(pl.String).drop_nulls() if factor in cells.columns else []
        name, _, value = (piece.strip() for piece in part.partition("="))
        unknown_option = ":" in wanted.get(factor, "") and name not in cells.columns
        if unknown_option or any(known.startswith(longer) for known in values):
            wanted[factor] = longer
        else:
            factor = name
            wanted[factor] = value
    return wanted


def _equals(numeric: bool, column: pl.Expr, value: str) -> pl.Expr:
    """Whether a column has this value, as numbers where it holds numbers."""
    if not numeric:
        return column.cast(pl.String) == value
    try:
        return column == float(value)
    except ValueError:
        return pl.lit(False)


PANELS = 6  # panels at most; of more levels the ends and some between
CELLS = 2000  # cells that are drawn as points at most
NOTHING = 0.005  # share of the differences below which a factor does nothing that could be seen


def sweep_curves_chart(view: SweepView, colour: str | None, panel: str | None, most: int = PANELS) -> fig.Chart:
    """A panel for each level of one factor, a line for each of another: the median of cells, in a band from the least
    to the largest of them. The more lines, the fainter the bands; the lines stay as they are.

    Args:
        view: One metric of a sweep.
        colour: The factor whose levels are lines; None draws one line.
        panel: The factor whose levels are panels; None draws one panel.
        most: Panels at most; of more levels the first, the last and some between are drawn.
    """
    lines, panel_levels = view.levels(colour), view.levels(panel)
    shown = evenly(range(len(panel_levels.labels)), most)
    curves = [curve for curve in view.curves(colour, panel) if curve.panel in shown]
    y, panels = _value_axis(view), []
    for level in shown:
        marks, depth, title = [], 1, _called(panel_levels, level)
        for curve in curves:
            if curve.panel != level:
                continue
            name, depth = _called(lines, curve.colour), max(depth, len(curve.centre) - 1)
            cells = f", median of {curve.cells} cells"
            hover: list[fig.Hover] = [
                (f"{title} {name}\nlayer {layer}: ", view.shown(value), cells)
                for layer, value in enumerate(curve.centre)
            ]
            x, ink = np.arange(len(curve.centre)), _colour(lines, curve.colour)
            line = fig.Line(x, curve.centre, ink, name or None, f"level {curve.colour}", hover=hover)
            marks.append(replace(line, bands=[(curve.low, curve.high)], strength=min(1.0, 3 / len(lines.labels))))
        panels.append(fig.Panel(fig.Axis("layer", last=depth), y, marks, title or "all cells"))
    rows = [
        (panel_levels.labels[curve.panel], lines.labels[curve.colour], layer, *numbers, curve.cells)
        for curve in curves
        for layer, numbers in enumerate(zip(curve.centre, curve.low, curve.high, strict=True))
    ]
    columns = (panel or "panel", colour or "line", "layer", f"{view.column}_median", "low", "high", "cells")
    panelled = f"in {len(shown)} panels by {panel or 'nothing'}"
    alt = f"{view.metric} by layer, {panelled}, a line for each {colour or 'sweep'}."
    size, across = (max(3.1, 6.4 / max(len(shown), 1)), 3.1), 2 if len(shown) > 1 else 1
    return fig.Chart(panels, fig.columns_of(columns, rows), alt, columns=across, height=330, shared=True, size=size)


def sweep_levels_chart(view: SweepView, most: int = PANELS) -> fig.Chart:
    """A panel for each factor, at most `most`, its levels along the x axis: a point for each cell's value at the last
    layer of the network, and a bar for the median of each level."""
    factors = list(view.effects)[:most]
    y, panels = _value_axis(view), []
    some = evenly(range(len(view.cells)), CELLS)
    hover: list[fig.Hover] = [
        (f"cell {view.cells['cell'][row]}\n{view.described(row)}\n", view.shown(view.ends[row]), "") for row in some
    ]
    noise = view.cells["noise"].to_numpy()[some]
    hollow = noise if noise.any() else None
    aside = 0.5 * (np.array(some) * 0.618034 % 1 - 0.5)
    for factor in factors:
        levels = view.levels(factor)
        at, deep = _places(levels)
        apart = float(np.diff(at).min(initial=at[-1] - at[0] or 1.0))
        middles = [_median(view.ends[levels.of == level]) for level in range(len(levels.labels))]
        words: list[fig.Hover] = [
            (f"{factor} {name}: median ", view.shown(value), "")
            for name, value in zip(levels.labels, middles, strict=True)
        ]
        x = at[levels.of[some]] + apart * aside
        marks = [
            fig.Points(x, view.ends[some], fig.line_colour(0), "dot", 5, 0.4, hollow, hover),
            fig.Points(at, middles, "ink", "bar", 14 if deep else 26, 1.0, hover=words),
        ]
        names = dict(zip(at.tolist(), levels.labels, strict=True))
        named = fig.Axis(factor, range=(-0.6, at[-1] + 0.6), labels=names, grid=False)
        axis = fig.Axis(factor, last=int(at[-1])) if deep else named
        share = view.effects[factor]
        does = "next to nothing" if share < NOTHING else f"{share:.0%} of the differences"
        panels.append(fig.Panel(axis, y, marks, f"{factor}: {does}"))
    columns = ("cell", *factors, "value", "log10")
    table = fig.columns_of(columns, [tuple(view.cells[name][row] for name in columns) for row in some])
    alt = f"{view.metric} at the last layer of each cell, by {', '.join(factors)}."
    across = 2 if len(factors) > 1 else 1
    return fig.Chart(panels, table, alt, columns=across, height=330, legend=False, size=(3.1, 3.1))


def _places(levels: Levels) -> tuple[np.ndarray, bool]:
    """Where levels stand: side by side; those of a depth, and then it is True, at their numbers, so that
    twice the depth is twice as far."""
    if levels.factor == "depth" and len(levels.labels) > 1 and all(map(str.isdecimal, levels.labels)):
        return np.array(levels.labels, float), True
    return np.arange(len(levels.labels), dtype=float), False


def _value_axis(view: SweepView) -> fig.Axis:
    """One scale for all panels."""
    title, numbers = metric_title(view.metric), view.layers[view.column].to_numpy()
    if view.log:
        return fig.Axis(title, fig.Powers(numbers.tolist()))
    low, high = ends(numbers)
    room = 0.05 * (high - low) or 0.5
    return fig.Axis(title, range=(low - room, high + room))


def _colour(levels: Levels, index: int) -> str:
    return fig.ordered_colour(index / max(1, len(levels.labels) - 1)) if levels.ordered else fig.line_colour(index)


def _called(levels: Levels, index: int) -> str:
    return f"{levels.factor} {levels.labels[index]}" if levels.factor else ""


def _median(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else float("nan")

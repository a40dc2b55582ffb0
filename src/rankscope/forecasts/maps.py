"""Maps of forecasts: two numbers of a design are varied, and every cell of the plane is forecast.

`forecast_map` gives the table, `map_chart` draws it. Cells run side by side in worker processes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import polars as pl

from rankscope import figures as fig
from rankscope.errors import LabError, require, require_one_of
from rankscope.forecasts.forecasting import Forecast, forecast_of
from rankscope.forecasts.plan import Plan, with_gain, with_skips
from rankscope.workers import run_pieces

Change = Callable[[Plan, float], Plan]


@dataclass(frozen=True)
class MapAxis:
    """A number of a design that a map varies."""

    title: str  # What it is, in words
    low: float  # The first value
    high: float  # The last value
    change: Change  # Gives the plan with that value
    in_logs: bool = False  # Whether values are evenly spread in their logs
    whole: bool = False  # Whether values are whole numbers

    def values(self, count: int) -> list[float]:
        """Values from the first to the last, `count` of them; fewer where whole numbers coincide."""
        low, high = (math.log(end) if self.in_logs else end for end in (self.low, self.high))
        spread = [low + (high - low) * k / max(1, count - 1) for k in range(count)]
        values = [math.exp(value) if self.in_logs else value for value in spread]
        return sorted({float(round(value)) for value in values}) if self.whole else [float(f"{v:.4g}") for v in values]


AXES: dict[str, MapAxis] = {
    "skip": MapAxis("weight of skips", 0.0, 1.0, with_skips),
    "depth": MapAxis("layers", 3, 48, lambda plan, layers: plan.changed(layers=int(layers)), True, True),
    "query_gain": MapAxis("gain of queries and keys", 0.25, 4.0, partial(with_gain, ("query", "key")), True),
    "value_gain": MapAxis("gain of values", 0.25, 4.0, partial(with_gain, ("value",)), True),
    "temperature": MapAxis(
        "temperature", 0.1, 10.0, lambda plan, factor: plan.changed(divisor=plan.arch.divisor * factor), True
    ),
    "rate": MapAxis("learning rate", 1e-4, 1e-2, lambda plan, lr: plan.changed(lr=lr), True),
}
"""Numbers that maps vary, by name."""


def forecast_map(
    forecast: Forecast,
    x: str = "skip",
    y: str = "depth",
    size: int = 7,
    workers: int = 2,
    progress: Callable[[int, int, str], None] = lambda done, total, said: None,
) -> pl.DataFrame:
    """The forecasts of a plane of designs: x · y · probability · place · residual (log10, after the
    last layer) · guess (whether the design is unlike all that were trained).

    Args:
        forecast: Of the design in which two numbers are varied.
        x: The number that goes across, of `AXES`.
        y: The number that goes up.
        size: Values of each.
        workers: Processes.
        progress: Called with how many cells are done, of how many, and the last one.

    Raises:
        LabError: A name is none of `AXES`, or both are the same.
    """
    for name in (x, y):
        require_one_of("map", name, AXES, LabError)
    require(x != y, f"a map must vary two numbers; got {x} twice", LabError, "map")
    cells = [(a, b) for b in AXES[y].values(size) for a in AXES[x].values(size)]
    rows: list[dict[str, float]] = []
    work = partial(_cell, forecast.design, x, y)
    for result in run_pieces(work, cells, workers):
        progress(len(rows), len(cells), f"{x} {result.piece[0]:g}, {y} {result.piece[1]:g}")
        rows.append(result.value or dict(zip(("x", "y"), result.piece, strict=True)))
    return pl.DataFrame(rows, infer_schema_length=None).sort("y", "x")


def _cell(plan: Plan, x: str, y: str, at: tuple[float, float]) -> dict[str, float]:
    """One cell of a map."""
    cell = forecast_of(AXES[y].change(AXES[x].change(plan, at[0]), at[1]), layers=False)
    numbers = {"probability": cell.probability, "place": cell.place, "residual": cell.readings["residual_last"]}
    return {"x": at[0], "y": at[1], **numbers, "guess": bool(cell.doubts)}


def map_chart(table: pl.DataFrame, x: str, y: str) -> fig.Chart:
    """The probability of learning over the plane of two numbers of a design.

    Args:
        table: What `forecast_map` returns.
        x: What goes across, in words.
        y: What goes up.
    """
    across, up = (sorted(table[name].unique().to_list()) for name in ("x", "y"))
    cells = {(row["x"], row["y"]): row for row in table.iter_rows(named=True)}
    values = np.array([[cells[a, b].get("probability") for a in across] for b in up], dtype=float)
    guesses = table["guess"].drop_nulls() if "guess" in table.columns else pl.Series([False])
    doubt = "" if not guesses.any() else ", as a guess" if guesses.all() else ", partly as a guess"
    heat = fig.Heatmap(
        range(len(across)), range(len(up)), values, f"probability that it learns{doubt}", range=(0.0, 1.0),
        numbers=len(across) * len(up) <= 64,
    )  # fmt: skip

    def axis(title: str, numbers: list[float]) -> fig.Axis:
        labels = {float(k): f"{value:g}" for k, value in enumerate(numbers)}
        return fig.Axis(title, range=(-0.5, len(numbers) - 0.5), labels=labels, grid=False)

    panel = fig.Panel(axis(x, across), axis(y, up), [heat])
    alt = f"Probability of learning by {x} and {y}: from {np.nanmin(values):.2f} to {np.nanmax(values):.2f}."
    return fig.Chart([panel], table.to_dict(as_series=False), alt)

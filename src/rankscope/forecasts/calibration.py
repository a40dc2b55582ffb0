"""Trained designs, which the predictor is made of: the tables that come with the package, and what became of each.

`data/forecast_trainings.csv` has a row for each training and `data/forecast_readings.csv` what was read off each design
before its first step; `python -m rankscope_studies.forecasts` trains, reads and writes them.
"""

import math
from importlib.resources import files
from io import BytesIO

import polars as pl

STEPS = 300  # Of each training
TABLE = "data/forecast_trainings.csv"
DIGITS = 4  # Decimals of readings, in the table and of what is compared with it
LEARNT = {"next-character": 0.1, "induction": 0.05}
"""By task, the nats by which a final loss must be below `Task.blind` for the network to have learnt anything."""


def trainings() -> pl.DataFrame:
    """The table of designs that were trained: number · seed · key · task · layers · lr · blind · loss_start ·
    loss_early · loss · accuracy · diverged. A design is what
    `rankscope_studies.forecasts.draw_design` gives for its number, if its key still is.

    >>> trainings().columns[:3]
    ['number', 'seed', 'key']
    """
    return pl.read_csv(BytesIO(files("rankscope").joinpath(TABLE).read_bytes()))


def outcomes() -> pl.DataFrame:
    """What became of each design when it was first trained: number · task · loss · learns · place.

    A design learns if its loss is below that of guessing by frequencies by `LEARNT` nats. Its place is its rank among
    designs of its task, 0 the lowest loss and 1 the highest; those that diverged have the highest.

    >>> sorted(outcomes().columns)
    ['learns', 'loss', 'number', 'place', 'task']
    """
    table = trainings().filter(pl.col("seed") == 0)
    loss = pl.when(pl.col("diverged") == 1).then(math.inf).otherwise(pl.col("loss").fill_nan(math.inf))
    margin = pl.col("task").replace_strict(LEARNT, return_dtype=pl.Float64)
    rank = (pl.col("loss").rank() - 0.5).over("task") / pl.len().over("task")
    return table.with_columns(loss=loss.fill_null(math.inf)).select(
        "number", "task", "loss", learns=pl.col("loss") < pl.col("blind") - margin, place=rank
    )

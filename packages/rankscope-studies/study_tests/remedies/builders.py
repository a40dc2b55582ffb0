"""Numbers of trainings, made up for tests."""

from collections.abc import Mapping
from dataclasses import replace

import polars as pl

from rankscope_studies.remedies import training_results as results
from rankscope_studies.remedies.measurements import RemedyMeasurements

ByDepth = Mapping[int, tuple[float, ...]]
FEW = ("none", "rezero", "attnscale", "lnscale", "gate")
LAYERS, SEEDS = 4, (0, 1)


def of_trainings(
    tables: RemedyMeasurements, quantity: str, values: Mapping[str, ByDepth], setting: str = "post"
) -> RemedyMeasurements:
    """By remedy and depth, a number a seed."""
    rows = [
        {"remedy": remedy, "setting": setting, "depth": depth, "seed": seed, "quantity": quantity, "value": x}
        for remedy, by_depth in values.items()
        for depth, numbers in by_depth.items()
        for seed, x in enumerate(numbers)
    ]
    return replace(tables, trained=results.completed(pl.DataFrame(rows)))

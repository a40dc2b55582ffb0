"""What figure 4's curves owe to how its networks are trained: one change of the recipe at a time.

`python -m benchmarks.recipes sort` or `hull`, then the number of training seeds and a device, prints the
table of `RESULTS.md`. A row takes a minute or two a seed on one core, one at a tenth of the rate several.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl

from rankscope.studies.dong2021.effects import effects
from rankscope.studies.dong2021.fig4 import COUNTS, FULL, REPEATS
from rankscope.studies.dong2021.tasks import Task, hull_task, sort_task
from rankscope.studies.dong2021.train import train

Make = Callable[[], Task]
PLAIN = {"dropout": 0.0}


def with_biases(make: Make) -> Task:
    """Biases on values and outputs as well, which the published network has."""
    task = make()
    return replace(task, arch=task.arch.replace(biases=("query", "key", "value", "output")))


ROWS: dict[str, list[tuple[str, Make, dict[str, Any]]]] = {
    "sort": [
        ("as the study, dropout 0.1", sort_task, {}),
        ("no dropout", sort_task, PLAIN),
        ("no dropout, a tenth of the rate, 5 times the epochs", sort_task,
         PLAIN | {"rate": 1e-4, "epochs": 300}),
        ("no dropout, 10 times the samples, as many steps", partial(sort_task, 10000),
         PLAIN | {"epochs": 6}),
        ("no dropout, embedding of spread 0.02", sort_task, PLAIN | {"spread": 0.02}),
        ("no dropout, biases on values and outputs", partial(with_biases, sort_task), PLAIN),
    ],
    "hull": [
        ("as the study, dropout 0.1", hull_task, {}),
        ("no dropout", hull_task, PLAIN),
        ("dropout, a tenth of the rate, 4 times the epochs", hull_task, {"rate": 1e-4, "epochs": 60}),
        ("dropout, biases on values and outputs", partial(with_biases, hull_task), {}),
    ],
}  # fmt: skip
LENGTH = {"sort": 1, "hull": 2}
"""Where our curves lay furthest from the published ones."""


def accuracies(
    make: Make, name: str, change: dict[str, Any], seed: int, device: str = "cpu", small: bool = False
) -> dict[str, float]:
    """Of one trained network: whole, and of 5 and 20 paths of the length that is asked about."""
    task, recipe = make(), replace(FULL[name][1], seed=seed, **change)
    if small:
        task = replace(task, train=task.train.part(slice(32)), test=task.test.part(slice(4)))
        recipe = replace(recipe, epochs=1)
    with TemporaryDirectory() as folder:
        tensors = train(task, recipe, Path(folder) / "checkpoint.pt", device)
    found = effects(task, tensors, task.test.to(device), COUNTS, 1 if small else REPEATS)
    own = found.filter(attention="own", length=LENGTH[name]).group_by("paths").agg(pl.col("accuracy").mean())
    whole = found.filter(attention="full")["accuracy"].item()
    return {"whole": whole, **dict(own.select("paths", "accuracy").iter_rows())}


def main() -> None:
    """A row per change: means over seeds, the least and the most in brackets."""
    name = sys.argv[1]
    seeds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    device = sys.argv[3] if len(sys.argv) > 3 else "cpu"
    print(f"| {name}, {seeds} seeds | whole network | 5 paths of length {LENGTH[name]} | 20 paths |")
    print("|---|---|---|---|")
    for label, make, change in ROWS[name]:
        found = [accuracies(make, name, change, seed, device) for seed in range(seeds)]
        cells = []
        for what in ("whole", *map(str, COUNTS)):
            values = [each[what] for each in found]
            cells.append(f"{sum(values) / seeds:.2f} ({min(values):.2f} to {max(values):.2f})")
        print(f"| {label} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

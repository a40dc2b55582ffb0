"""What figure 4's curves owe to how its networks are trained: one change of the recipe at a time.

`python -m rankscope_studies.research.recipes sort` or `hull`, then the number of training seeds and a device, prints
its table of benchmarks/RESULTS.md. A row takes a minute or two a seed on one core, one at a tenth of the rate several.
"""

import sys
from dataclasses import replace
from typing import Any

import polars as pl

from rankscope_studies.dong2021.fig4 import COUNTS, FULL, REPEATS, PublishedSort
from rankscope_studies.dong2021.path_effects import path_effects
from rankscope_studies.dong2021.tasks import Hull

PLAIN = {"dropout": 0.0}
BIASES = {"fields": {"biases": ("query", "key", "value", "output")}}
"""On values and outputs as well, which the published network has."""
ROWS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "sort": [
        ("as the study, dropout 0.1", {}),
        ("no dropout", PLAIN),
        ("no dropout, a tenth of the rate, 5 times the epochs", PLAIN | {"lr": 1e-4, "epochs": 300}),
        ("no dropout, 10 times the samples, as many steps",
         PLAIN | {"task": PublishedSort(10000), "epochs": 6}),
        ("no dropout, embedding of spread 0.02", PLAIN | {"embedding_std": 0.02}),
        ("no dropout, biases on values and outputs", PLAIN | BIASES),
    ],
    "hull": [
        ("as the study, dropout 0.1", {}),
        ("no dropout", PLAIN),
        ("dropout, a tenth of the rate, 4 times the epochs", {"lr": 1e-4, "epochs": 60}),
        ("dropout, biases on values and outputs", BIASES),
    ],
}  # fmt: skip
LENGTH = {"sort": 1, "hull": 2}
"""Where our curves lay furthest from the published ones."""


def accuracies(
    name: str, change: dict[str, Any], seed: int, device: str = "cpu", small: bool = False
) -> dict[str, float]:
    """Of one trained network: whole, and of 5 and 20 paths of the length that is asked about."""
    plan = replace(FULL[name], **change)
    if small:
        few = PublishedSort(32, 4) if name == "sort" else Hull(32, 4)
        plan = replace(plan, task=few, epochs=1)
    training = plan.training(seed, device=device).finish()
    test = plan.task.data[1].to(device)
    table = path_effects(training.models[0], test, COUNTS, 1 if small else REPEATS)
    own = table.filter(attention="own", length=LENGTH[name]).group_by("paths").agg(pl.col("accuracy").mean())
    whole = table.filter(attention="full")["accuracy"].item()
    return {"whole": whole, **dict(own.select("paths", "accuracy").iter_rows())}


def main() -> None:
    """A row per change: means over seeds, the least and the most in brackets."""
    name = sys.argv[1]
    seeds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    device = sys.argv[3] if len(sys.argv) > 3 else "cpu"
    print(f"| {name}, {seeds} seeds | whole network | 5 paths of length {LENGTH[name]} | 20 paths |")
    print("|---|---|---|---|")
    for label, change in ROWS[name]:
        found = [accuracies(name, change, seed, device) for seed in range(seeds)]
        cells = []
        for what in ("whole", *map(str, COUNTS)):
            values = [each[what] for each in found]
            cells.append(f"{sum(values) / seeds:.2f} ({min(values):.2f} to {max(values):.2f})")
        print(f"| {label} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

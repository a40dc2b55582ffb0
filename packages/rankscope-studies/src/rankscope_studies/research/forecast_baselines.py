"""What the registered forecasts are to be compared with: guessing, trees on a design's own fields, and another seed.

    cd packages/rankscope-studies/data
    python -m rankscope_studies.research.forecast_baselines forecasts.json outcomes.jsonl

Trees are scikit-learn's, as they come, fitted for each task to the table of trained designs that the predictor was
fitted to; they see what a design says of itself (its depth, norms, skips, gains, rate, ...), and nothing that was read
off a network. Nothing here calls the library's scorer (`python -m rankscope_studies.forecasts score`).
"""

import csv
import json
import sys
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import rankdata
from sklearn.ensemble import (
    ExtraTreesClassifier,
    GradientBoostingClassifier,
    HistGradientBoostingClassifier,
    RandomForestClassifier,
)

from rankscope_studies.forecasts import draw_design

MARGINS = {"next-character": 0.1, "induction": 0.05}  # nats below guessing by frequencies that count as learning
TABLE = Path(str(files("rankscope"))) / "data" / "forecast_trainings.csv"
TREES = (HistGradientBoostingClassifier, GradientBoostingClassifier, RandomForestClassifier, ExtraTreesClassifier)
SEEDS = 3  # Of each kind of trees
CHOICES = ("task", "scheme", "remedy", "norm", "norm_place", "mlp", "activation", "mask", "positions")


def fields_of(design: dict[str, Any]) -> dict[str, Any]:
    """What a design says of itself, by name, its network's fields beside the others."""
    usual = {"mask": "causal", "positions": "absolute"}
    return {**usual, **{name: value for name, value in design.items() if name != "fields"}, **design["fields"]}


def columns(designs: list[dict[str, Any]]) -> np.ndarray:
    """Numbers of designs `[design, column]`: a column for each value of each choice."""
    values = {name: sorted({str(draw[name]) for draw in map(fields_of, designs)}) for name in CHOICES}
    return np.array([row(fields_of(design), values) for design in designs])


def row(fields: dict[str, Any], values: dict[str, list[str]]) -> list[float]:
    """The numbers of one design; `values` are those that each choice can have."""
    numbers = ("layers", "attention_skip", "mlp_skip", "final_norm", "query_gain", "value_gain", "embedding_std", "lr")
    told = [float(fields[name]) for name in numbers]
    return told + [float(str(fields[name]) == value) for name in CHOICES for value in values[name]]


def lacks_a_skip(fields: dict[str, Any]) -> bool:
    """True if attention or the MLP has no skip around it."""
    return fields["attention_skip"] == 0 or (fields["mlp"] != "none" and fields["mlp_skip"] == 0)


def spearman(a: Any, b: Any) -> float:
    """The correlation of ranks."""
    return float(np.corrcoef(rankdata(a), rankdata(b))[0, 1])


def learnt(loss: float, blind: float, task: str, diverged: bool = False) -> bool:
    """True if a final loss is below that of guessing by frequencies, `blind`, by the margin of the task."""
    return not diverged and bool(loss < blind - MARGINS[task])


def baselines(registered: Path, outcomes: Path) -> dict[str, Any]:
    """Every number of the page that is told of the registered test, by name."""
    said = {line["number"]: line for line in json.loads(registered.read_text())["forecasts"]}
    lines = [json.loads(line) for line in outcomes.read_text().splitlines()]
    lines = [line for line in lines if line["number"] in said]
    by_seed = {(line["number"], line["seed"]): line for line in lines}
    came = [line for line in lines if line["seed"] == 0]
    tasks = np.array([line["design"]["task"] for line in came])
    truth = np.array([learnt(line["loss"], line["blind"], line["design"]["task"], line["diverged"]) for line in came])
    chance = np.array([said[line["number"]]["probability"] for line in came])
    told: dict[str, Any] = {}
    with TABLE.open() as file:
        known = [line for line in csv.DictReader(file) if line["seed"] == "0"]
    old = [vars(draw_design(int(line["number"]))) for line in known]
    old_truth = np.array([
        learnt(float(line["loss"] or "inf"), float(line["blind"]), line["task"], line["diverged"] == "1")
        for line in known
    ])  # fmt: skip
    X = columns([*old, *(line["design"] for line in came)])
    old_X, new_X, old_tasks = X[: len(old)], X[len(old) :], np.array([line["task"] for line in known])
    for task in MARGINS:
        mine, theirs = tasks == task, old_tasks == task
        trees = []
        for kind, seed in product(TREES, range(SEEDS)):
            fitted = kind(random_state=seed).fit(old_X[theirs], old_truth[theirs])
            trees.append(float((fitted.predict(new_X[mine]) == truth[mine]).mean()))
        told[task] = {
            "designs": int(mine.sum()), "forecast": float(((chance > 0.5) == truth)[mine].mean()),
            "guessing": float(max(truth[mine].mean(), 1 - truth[mine].mean())),
            "trees": [min(trees), max(trees)],
            "without a skip": sum(lacks_a_skip(line["design"]["fields"]) for line in np.array(came)[mine]),
        }  # fmt: skip
        unsure = mine & (chance > 0.1) & (chance < 0.9)
        told[task]["between 0.1 and 0.9"] = [int(unsure.sum()), float(((chance > 0.5) == truth)[unsure].mean())]
        again = [line for line in came if line["design"]["task"] == task and (line["number"], 1) in by_seed]
        losses = [[by_seed[line["number"], seed]["loss"] for line in again] for seed in (0, 1, 2)]
        places = [said[line["number"]]["place"] for line in again]
        told[task]["repeated"] = len(again)
        told[task]["forecast of each seed"] = [spearman(places, loss) for loss in losses]
        told[task]["seeds with each other"] = [spearman(losses[a], losses[b]) for a, b in ((0, 1), (0, 2), (1, 2))]
    return told


if __name__ == "__main__":
    sys.stdout.write(json.dumps(baselines(Path(sys.argv[1]), Path(sys.argv[2])), indent=1) + "\n")

"""The worked example of docs/forecast.md, trained: 96 layers of post-norm, its changes, and shallower ones.

    # goes on where it was
    python -m rankscope_studies.research.deep_post_norm train OUTCOMES.jsonl --device cuda --workers 11
    python -m rankscope_studies.research.deep_post_norm report OUTCOMES.jsonl  # beside the forecasts

`report` forecasts each network again (seconds to a minute each) and prints what was forecast beside what came.
"""

import argparse
import json
import time
from collections import defaultdict
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from rankscope import Architecture
from rankscope.errors import RankscopeError
from rankscope.forecasts import LEARNT, Plan, changes, forecast_of
from rankscope.lab import Initialisation, NextCharacter, Recipe
from rankscope.workers import run_pieces
from rankscope_studies.forecasts import EVALUATION, lines_of

LAYERS, SHALLOWER, SEEDS = 96, (4, 8, 12, 16, 24, 48), 3
PARTS = ("norm", "remedies", "initialisation", "rate")


def plans() -> dict[str, Plan]:
    """The networks by what was changed."""
    arch = Architecture(layers=LAYERS, width=64, heads=4, norm_place="post", final_norm=False, mask="causal")
    unchanged = Plan(arch, NextCharacter(), Recipe(steps=300, lr=1e-3, batch_size=16), Initialisation("xavier"))
    found = {"unchanged": unchanged}
    found.update({f"{layers} layers": unchanged.changed(layers=layers) for layers in SHALLOWER})
    for change, make in changes(unchanged, PARTS):
        try:
            found[change] = make()
        except RankscopeError:  # a change that does not go onto this network
            continue
    return found


def train(piece: tuple[str, int], device: str) -> dict[str, Any]:
    """The final loss of one network and one seed, and whether it learnt."""
    change, seed = piece
    plan, start = plans()[change], time.perf_counter()
    plan = replace(plan, recipe=replace(plan.recipe, seed=seed))
    training = plan.training(device)
    for _ in training:
        pass
    loss = training.evaluate(EVALUATION)[0].loss
    learns = loss < plan.task.blind - LEARNT[plan.task.name]
    seconds = round(time.perf_counter() - start, 1)
    return {"change": change, "seed": seed, "loss": loss, "learns": learns, "seconds": seconds}


def report(outcomes: list[dict[str, Any]]) -> str:
    """The table: probability and place by the forecast, seeds that learnt and their loss."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in outcomes:
        found[line["change"]].append(line)
    rows = ["| network | probability | place | learnt | loss, least to largest |", "|---|---|---|---|---|"]
    for change, plan in plans().items():
        if change in found:
            forecast, lines = forecast_of(plan, layers=False), found[change]
            losses = sorted(line["loss"] for line in lines)
            learnt = f"{sum(line['learns'] for line in lines)} of {len(lines)}"
            told = f"{forecast.probability:.2f} | {100 * forecast.place:.0f}"
            said = f"{told} | {learnt} | {losses[0]:.2f} to {losses[-1]:.2f}"
            rows.append(f"| {change} | {said} |")
    return "\n".join(rows)


def main() -> None:
    """Run one of the commands of the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("train", "report"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    if options.command == "report":
        print(report(lines_of(options.file)))
        return
    done = {(line["change"], line["seed"]) for line in lines_of(options.file)}
    pieces = [(change, seed) for seed in range(SEEDS) for change in plans() if (change, seed) not in done]
    with options.file.open("a") as file:
        for result in run_pieces(partial(train, device=options.device), pieces, options.workers):
            if result.value is None:
                print(f"{result.piece}: {result.error}", flush=True)
            else:
                file.write(json.dumps(result.value) + "\n")
                file.flush()


if __name__ == "__main__":  # workers find functions by the name of their module, and none in __main__
    import_module("rankscope_studies.research.deep_post_norm").main()

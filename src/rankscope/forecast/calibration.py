"""Trained designs: what became of each, as one line of a table.

`trained(seed, design)` trains a design and returns the losses; `python -m rankscope.forecast.calibration` trains many
side by side, each written when it ends, so that an interrupted run goes on where it was.
"""

import argparse
import json
import math
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rankscope.forecast.designs import STEPS, Design, drawn
from rankscope.lab.trial import free_memory
from rankscope.workers import run_pieces

EARLY = 0.1  # The share of a training after which its loss is read once
EVALUATION = 256  # Held-out samples that losses are taken on


def trained(piece: tuple[int, int], device: str = "cpu", steps: int = STEPS) -> dict[str, Any]:
    """What became of the design of a number, trained with a seed.

    Args:
        piece: (the number that the design is drawn from, the seed of its training).
        device: Where it is trained.
        steps: Steps of the training.
    """
    number, seed = piece
    design, start = replace(drawn(number), steps=steps), time.perf_counter()
    training = design.training(seed, device)
    begun = training.evaluate(EVALUATION)[0].loss
    early = math.nan
    for step in training:
        if step == round(EARLY * steps):
            early = training.evaluate(EVALUATION)[0].loss
    del_losses = [float(loss) for loss in training.losses]
    ended = training.evaluate(EVALUATION)[0]
    line = {
        "number": number, "seed": seed, "key": design.key, "design": asdict(design), "loss_start": begun,
        "loss_early": early, "loss": ended.loss, "accuracy": ended.accuracy, "blind": training.task.blind,
        "diverged": not all(map(math.isfinite, del_losses)),
        "losses": [round(sum(del_losses[k : k + 10]) / 10, 4) for k in range(0, steps, 10)],
        "seconds": round(time.perf_counter() - start, 1), "device": device,
    }  # fmt: skip
    del training
    free_memory(device)
    return line


def main() -> None:
    """Train the designs of many numbers side by side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--designs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/designs.jsonl"))
    options = parser.parse_args()
    lines = options.output.read_text().splitlines() if options.output.exists() else []
    done = {(line["number"], line["seed"]) for line in map(json.loads, lines)}
    numbers = range(options.first, options.first + options.designs)
    pieces = [(number, seed) for seed in range(options.seeds) for number in numbers if (number, seed) not in done]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    work = partial(trained, device=options.device, steps=options.steps)
    until = time.time() + 60 * options.minutes
    with options.output.open("a") as file:
        for result in run_pieces(work, pieces, options.workers, deadline=until):
            print(result.piece, f"{result.seconds:.1f} s", result.error or f"{result.value['loss']:.3f}", flush=True)
            if result.value is not None:
                file.write(json.dumps(result.value) + "\n")
                file.flush()


if __name__ == "__main__":
    main()

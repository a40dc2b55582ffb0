"""Trained designs: what became of each, and the table of those that were trained (`data/forecast_trainings.csv`).

`trained` draws a design, trains it and returns what came of it; `train_designs` does that for many, several at once,
and writes each when it ends, so that an interrupted run goes on where it was.
"""

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any

import polars as pl

from rankscope.forecast.designs import STEPS, drawn
from rankscope.lab.trial import free_memory
from rankscope.workers import run_pieces

EARLY = 0.1  # The share of a training after which its held-out loss is read once
EVALUATION = 256  # Held-out samples that losses are taken on
DRAWN = 10  # Steps whose losses are averaged for one point of the curve that is kept
TABLE = "data/forecast_trainings.csv"


def trainings() -> pl.DataFrame:
    """The table of designs that were trained: number · seed · key · task · layers · lr · blind · loss_start ·
    loss_early · loss · accuracy · diverged. A design is `designs.drawn(number)`; its key says that it is the same.

    >>> trainings().columns[:3]
    ['number', 'seed', 'key']
    """
    return pl.read_csv(BytesIO(files("rankscope").joinpath(TABLE).read_bytes()))


def trained(piece: tuple[int, int], device: str = "cpu", steps: int = STEPS) -> dict[str, Any]:
    """What became of a design.

    Args:
        piece: (the number that the design is drawn from, the seed of its training).
        device: Where it is trained.
        steps: Steps of the training.
    """
    number, seed = piece
    design, start = replace(drawn(number), steps=steps), time.perf_counter()
    training = design.training(seed, device)
    first, early = training.evaluate(EVALUATION)[0].loss, math.nan
    for step in training:
        if step == round(EARLY * steps):
            early = training.evaluate(EVALUATION)[0].loss
    last, losses = training.evaluate(EVALUATION)[0], [float(loss) for loss in training.losses]
    outcome = {
        "number": number, "seed": seed, "key": design.key, "design": asdict(design), "blind": training.task.blind,
        "loss_start": first, "loss_early": early, "loss": last.loss, "accuracy": last.accuracy,
        "diverged": not all(map(math.isfinite, losses)),
        "losses": [round(sum(losses[k : k + DRAWN]) / DRAWN, 4) for k in range(0, steps - DRAWN + 1, DRAWN)],
        "seconds": round(time.perf_counter() - start, 1), "device": device,
    }  # fmt: skip
    del training
    free_memory(device)
    return outcome


def train_designs(
    pieces: Iterable[tuple[int, int]],
    output: Path,
    *,
    workers: int = 2,
    device: str = "cpu",
    steps: int = STEPS,
    deadline: float = math.inf,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Train designs, several at once, and write a line of JSON for each when it ends.

    Args:
        pieces: (number of the design, seed) of each training; those that the file has are left out.
        output: The file, which is gone on with.
        workers: Processes; on a GPU they share it best under NVIDIA's MPS.
        device: Where designs are trained.
        steps: Steps of each training.
        deadline: Seconds since 1970 after which none is begun.
        say: Called with a sentence for each.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    lines = output.read_text().splitlines() if output.exists() else []
    done = {(line["number"], line["seed"]) for line in map(json.loads, lines)}
    work = partial(trained, device=device, steps=steps)
    with output.open("a") as file:
        for result in run_pieces(work, [piece for piece in pieces if piece not in done], workers, deadline=deadline):
            outcome = result.value
            say(f"{result.piece}: {result.error if outcome is None else round(outcome['loss'], 3)}")
            if outcome is not None:
                file.write(json.dumps(outcome) + "\n")
                file.flush()

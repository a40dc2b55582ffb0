"""Trained designs: what becomes of each, what is read off it before, and the tables of both.

`train_designs` draws designs, trains them and writes what came of each; `read_designs` writes what is read off each
before its first step. Both take several at once and write each when it ends, so that an interrupted run goes on where
it was. `python -m rankscope_studies.forecasts train`, `read` and `tables` run them, and make the tables that come with
rankscope: `data/forecast_trainings.csv` and `data/forecast_readings.csv`, which its predictor is made of.
"""

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl

from rankscope.forecasts import DIGITS, STEPS, point_of
from rankscope.lab import release_memory
from rankscope.workers import run_pieces
from rankscope_studies.forecasts.designs import draw_design

EARLY = 0.1  # The share of a training after which its held-out loss is read once
EVALUATION = 256  # Held-out samples that losses are taken on
DRAWN = 10  # Steps whose losses are averaged for one point of the curve that is kept
COLUMNS = ("number", "seed", "key", "task", "layers", "lr", "blind", "loss_start", "loss_early", "loss", "accuracy",
           "diverged")  # fmt: skip


def trained_settings(numbers: Iterable[int]) -> dict[str, list[Any]]:
    """The values that designs of these numbers have of each setting (`Plan.settings`): the least and the largest of a
    number, else every value.

    >>> trained_settings(range(3))["width"]
    [64, 64]
    """
    rows = [draw_design(design).plan().settings for design in numbers]
    values = {name: [row[name] for row in rows] for name in rows[0]}
    return {
        name: [min(column), max(column)] if type(column[0]) in (int, float) else sorted(set(column), key=str)
        for name, column in values.items()
    }


def train_design(piece: tuple[int, int], device: str = "cpu", steps: int = STEPS) -> dict[str, Any]:
    """What became of a design.

    Args:
        piece: (the number that the design is drawn from, the seed of its training).
        device: Where it is trained.
        steps: Steps of the training.
    """
    design_number, seed = piece
    design, start = replace(draw_design(design_number), steps=steps), time.perf_counter()
    training = design.training(seed, device)
    first, early = training.evaluate(EVALUATION)[0].loss, math.nan
    for step in training:
        if step == round(EARLY * steps):
            early = training.evaluate(EVALUATION)[0].loss
    last, losses = training.evaluate(EVALUATION)[0], [float(loss) for loss in training.losses]
    outcome = {
        "number": design_number, "seed": seed, "key": design.key, "design": asdict(design),
        "blind": training.task.blind, "loss_start": first, "loss_early": early, "loss": last.loss,
        "accuracy": last.accuracy, "diverged": not all(map(math.isfinite, losses)),
        "losses": [round(sum(losses[k : k + DRAWN]) / DRAWN, 4) for k in range(0, steps - DRAWN + 1, DRAWN)],
        "seconds": round(time.perf_counter() - start, 1), "device": device,
    }  # fmt: skip
    del training
    release_memory(device)
    return outcome


def read_design(number: int) -> dict[str, Any]:
    """What is read off a design before its first step, and the numbers of its architecture (`described`)."""
    design, start = draw_design(number), time.perf_counter()
    plan = design.plan()
    point = point_of(plan.model(), plan.task, plan.recipe)
    return {"number": number, "key": design.key, "point": point, "seconds": round(time.perf_counter() - start, 1)}


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
    done = {(line["number"], line["seed"]) for line in lines_of(output) if _is_current(line)}
    work = partial(train_design, device=device, steps=steps)
    _write(work, [piece for piece in pieces if piece not in done], output, workers, deadline, say)


def read_designs(
    numbers: Iterable[int],
    output: Path,
    *,
    workers: int = 2,
    deadline: float = math.inf,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Read designs before they are trained, several at once, and write a line of JSON for each when it ends.

    Args:
        numbers: The numbers of the designs; those that the file has are left out.
        output: The file, which is gone on with.
        workers: Processes.
        deadline: Seconds since 1970 after which none is begun.
        say: Called with a sentence for each.
    """
    done = {line["number"] for line in lines_of(output) if _is_current(line)}
    _write(read_design, [k for k in numbers if k not in done], output, workers, deadline, say)


def lines_of(*outputs: Path) -> list[dict[str, Any]]:
    """The lines of files of JSON; none of a file that is not there."""
    return [json.loads(line) for path in outputs if path.exists() for line in path.read_text().splitlines()]


def _write(
    work: Callable[[Any], dict[str, Any]],
    pieces: list[Any],
    output: Path,
    workers: int,
    deadline: float,
    say: Callable[[str], None],
) -> None:
    """Append a line for each piece of work when it ends."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a") as file:
        for result in run_pieces(work, pieces, workers, deadline=deadline):
            say(f"{result.piece}: {result.error if result.value is None else result.value['seconds']}")
            if result.value is not None:
                file.write(json.dumps(result.value) + "\n")
                file.flush()


def training_table(lines: Iterable[dict[str, Any]]) -> pl.DataFrame:
    """The table of `trainings` from lines of `train_designs`; of designs that are drawn otherwise today, none."""
    rows = [
        {**line, "task": line["design"]["task"], "layers": line["design"]["layers"], "lr": line["design"]["lr"],
         "diverged": int(line["diverged"])}
        for line in lines
    ]  # fmt: skip
    rows = [row for row in rows if _is_current(row)]
    table = pl.DataFrame([{name: row[name] for name in COLUMNS} for row in rows], infer_schema_length=None)
    rounded = [pl.col(name).round(5) for name in ("blind", "loss_start", "loss_early", "loss", "accuracy")]
    return (
        table.with_columns(rounded).unique(["number", "seed"], keep="last", maintain_order=True).sort("number", "seed")
    )


def point_table(lines: Iterable[dict[str, Any]]) -> pl.DataFrame:
    """number · one column for each reading and number of the architecture, from lines of `read_designs`."""
    rows = [{"number": line["number"], **line["point"]} for line in lines if _is_current(line)]
    table = pl.DataFrame(rows, infer_schema_length=None).unique("number", keep="last", maintain_order=True)
    return table.with_columns(pl.exclude("number").round(DIGITS)).sort("number")


def _is_current(line: dict[str, Any]) -> bool:
    """Whether the design of a line is drawn today as it was when the line was written."""
    return bool(line["key"] == draw_design(line["number"]).key)

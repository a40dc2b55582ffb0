"""What remedies cost: the time of a training step, as a ratio to that without a remedy, and parameters.

Networks of all remedies are trained in turn, a few steps each, again and again, so that a busy machine slows
them alike; of each the median of the rounds is taken, of times and of ratios within a round. Nothing else
should run on the machine.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from statistics import median

import polars as pl
import torch

from rankscope.errors import ArchitectureError
from rankscope.lab.training import Training
from rankscope.lab.trial import NONE, SCHEMA, SETTINGS, Trial, TrialSizes
from rankscope.studies.remedies.trained import EVERY, FULL, QUICK
from rankscope.studies.study import Setup
from rankscope.workers import threads_set

ROUNDS, STEPS, WARM = 15, 3, 6
"""Rounds, steps of each network in a round, and steps before the first."""


def costs(
    setup: Setup, remedies: Sequence[str] = EVERY, depth: int = 12, *, sizes: TrialSizes | None = None
) -> pl.DataFrame:
    """remedy · setting · depth · seed · quantity · value · refused, as trials have it (`lab/trial.py`), with
    the quantities `seconds_per_step` (forward, backward and the optimiser's), `ratio`, `parameters` and
    `parameters_added`. The setting is the first that takes the remedy, `pre` if it does; the ratio is to no
    remedy in the same, which is in the table too."""
    sizes = sizes or (FULL if setup.full else QUICK).sizes
    steps = WARM + ROUNDS * STEPS
    chosen = [Trial(each, "", depth, (0,), replace(sizes, steps=steps)) for each in remedies]
    about = {"remedies": list(remedies), "depth": depth, "sizes": str(sizes)}
    return setup.kept("costs", lambda: _timed(chosen, setup.device), **about)


def _timed(trials: Sequence[Trial], device: str) -> pl.DataFrame:
    """All of them, and those without a remedy that they are compared with."""
    with threads_set(1):
        fitting = [_fitted(trial, device) for trial in trials]
        running = {fit: training for fit, training, _ in fitting if training is not None}
        for base in {replace(fit, remedy=NONE) for fit in running} - {*running}:
            running[base] = base.training(device)
        seconds = _rounds(running, device)
    rows: list[tuple[object, ...]] = [
        (fit.remedy, None, fit.depth, None, None, None, why) for fit, training, why in fitting if not training
    ]
    for fit, training in running.items():
        base = replace(fit, remedy=NONE)
        ratio = median(mine / theirs for mine, theirs in zip(seconds[fit], seconds[base], strict=True))
        number, without = _number(training), _number(running[base])
        found = {
            "seconds_per_step": median(seconds[fit]), "ratio": ratio, "parameters": number,
            "parameters_added": number - without,
        }  # fmt: skip
        about = fit.remedy, fit.setting, fit.depth, fit.seeds[0]
        rows += [(*about, quantity, value, None) for quantity, value in found.items()]
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def _fitted(trial: Trial, device: str) -> tuple[Trial, Training | None, str]:
    """In the first setting that takes it; else why the last does not."""
    said = ""
    for setting in SETTINGS:
        fit = replace(trial, setting=setting)
        try:
            return fit, fit.training(device), ""
        except ArchitectureError as error:
            said = str(error)
    return trial, None, said


def _rounds(trainings: dict[Trial, Training], device: str) -> dict[Trial, list[float]]:
    """Seconds of a step of each, by round."""
    going = {trial: iter(training) for trial, training in trainings.items()}
    for steps in going.values():
        _advanced(steps, WARM, device)
    taken: dict[Trial, list[float]] = {trial: [] for trial in going}
    for _ in range(ROUNDS):
        for trial, steps in going.items():
            taken[trial].append(_advanced(steps, STEPS, device) / STEPS)
    return taken


def _advanced(steps: Iterator[int], number: int, device: str) -> float:
    """Seconds for so many steps, with all that a GPU has still to do."""
    start = time.perf_counter()
    for _ in islice(steps, number):
        pass
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _number(training: Training) -> int:
    return sum(each.numel() for each in training.models[0].parameters())

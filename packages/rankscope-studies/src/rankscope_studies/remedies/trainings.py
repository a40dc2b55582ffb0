"""What remedies do to networks that are trained from scratch, and what their steps cost: tables over
remedies, settings, depths and seeds (`trial.py` says what is in them).

Each remedy in each setting at each depth is a piece of work by itself, cached in `FOLDER/parts` when it is
done; a run that is killed loses those that it was at.

Costs are the time of a training step, as a ratio to that without a remedy, and parameters. Networks of all remedies are
trained in turn, a few steps each, again and again, so that a busy machine slows them alike; of each the median of the
rounds is taken, of times and of ratios within a round. Nothing else should run on the machine.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from statistics import median
from typing import TypeVar

import polars as pl
import torch

from rankscope.errors import ArchitectureError, StudyError
from rankscope.lab import Training
from rankscope.remedies import REMEDIES
from rankscope.runs import tables
from rankscope.workers import run_pieces, threads_set
from rankscope_studies.study import Setup, StudyTexts
from rankscope_studies.trial import NONE, SCHEMA, SETTINGS, SIGMA, Trial, TrialSizes

EVERY = (NONE, *REMEDIES.shipped, SIGMA)


@dataclass(frozen=True)
class TrainingPlan:
    """What is trained, where nothing else is asked for."""

    settings: tuple[str, ...]
    depths: tuple[int, ...]
    sizes: TrialSizes
    seeds: tuple[int, ...] = (0, 1, 2)

    def changed(self, seeds: int, depths: tuple[int, ...] | None, steps: int | None) -> "TrainingPlan":
        """This plan with so many seeds, and with other depths and steps where they are given."""
        sizes = self.sizes if steps is None else replace(self.sizes, steps=steps)
        return replace(self, depths=depths or self.depths, sizes=sizes, seeds=tuple(range(seeds)))


FULL = TrainingPlan(tuple(SETTINGS), (6, 12, 24, 48), TrialSizes())
SLOWER = TrainingPlan(("post", "no skips"), (24,), TrialSizes(lr=3e-4))
"""Where depth decides who learns: whether a smaller learning rate changes who."""
QUICK = TrainingPlan(("pre",), (2, 6), TrialSizes(width=64, context=32, batch=8, steps=60, evaluation_samples=64))
Key = TypeVar("Key")
ROUNDS, STEPS, WARM = 15, 3, 6  # Rounds, steps of each network in a round, and steps before the first
TEXTS = StudyTexts("remedies", "study")


def trained(
    setup: Setup, remedies: Sequence[str], plan: TrainingPlan, *, workers: int = 1, minutes: float = math.inf
) -> pl.DataFrame:
    """Train networks with each remedy: remedy · setting · depth · seed · quantity · value · refused. What failed, or
    was not begun within so many minutes, has a row that says so; the next call does it."""
    trials = [
        Trial(remedy, setting, depth, plan.seeds, plan.sizes)
        for remedy, setting, depth in product(remedies, plan.settings, plan.depths)
    ]
    if len(set(trials)) < len(trials):
        names = ", ".join(remedies)
        raise StudyError(f"remedies, settings and depths must be different ones; got {names}", subject="remedies")
    until = time.time() + 60 * minutes
    work = partial(_cached_table, setup.folder, setup.full, setup.device, until)
    done: dict[Trial, pl.DataFrame] = {}
    processes = workers if workers > 1 else 0
    for result in run_pieces(work, trials, processes, cost=lambda trial: trial.depth, deadline=until):
        trial, table = result.piece, result.value
        done[trial] = table = _failed(trial, result.error or "") if table is None else table
        seconds = f"{len(done)}/{len(trials)} {result.seconds:6.1f} s"
        setup.say(f"{seconds}  {trial.remedy}, {trial.setting}, {trial.depth}: {_outcome(table)}")
    late = "it was not begun in time: the next run does it"
    return pl.concat([done[trial] if trial in done else _failed(trial, late) for trial in trials])


def gathered(folder: str | Path, how: str = "trained") -> pl.DataFrame:
    """All tables of trials that a folder has, made on whatever machine, in the order of remedies; their names
    begin with `how`."""
    parts = [tables.read_parquet(part)[0] for part in sorted(Path(folder).glob(f"parts/{how}-*.parquet"))]
    order = {remedy: k for k, remedy in enumerate(EVERY)}
    parts.sort(key=lambda part: order.get(part["remedy"][0], len(order)))
    return pl.concat([pl.DataFrame(schema=SCHEMA), *parts])


def recipes(folder: str | Path) -> list[str]:
    """How networks were trained whose tables a folder has: a sentence for each way that there was."""
    networks: dict[str, int] = {}
    parts = sorted(Path(folder).glob("parts/*.parquet"))
    for part in (part for part in parts if part.name.startswith(("trained-", "at="))):
        table, manifest = tables.read_parquet(part)
        if manifest is None or manifest.key is None:
            continue
        key = manifest.key
        how, seeds = key["settings"]["sizes"], ", ".join(map(str, key["settings"]["seeds"]))
        sentence = TEXTS.sentence("recipe", **how, seeds=seeds, device=key["device"])
        networks[sentence] = networks.get(sentence, 0) + len(table.filter(quantity="diverged"))
    return [f"Trained: {count} networks {sentence}." for sentence, count in networks.items() if count]


def _cached_table(folder: Path, full: bool, device: str, until: float, trial: Trial) -> pl.DataFrame:
    """A trial's table, from the folder where it has been done."""
    return Setup(folder, full, device).cached(trial.name, lambda: trial.table(device, until), **asdict(trial))


def _failed(trial: Trial, why: str) -> pl.DataFrame:
    row = (trial.remedy, trial.setting, trial.depth, None, None, None, f"not run: {why}")
    return pl.DataFrame([row], schema=SCHEMA, orient="row")


def _outcome(table: pl.DataFrame) -> str:
    """What one says of a trial that has ended."""
    if table["quantity"].null_count():
        return str(table["refused"][0])
    losses, diverged = (table.filter(quantity=name)["value"] for name in ("loss", "diverged"))
    listed = ", ".join(f"{loss:.3f}" for loss in losses)
    return f"loss {listed or 'none'}, {int(diverged.sum())} diverged"


def costs(setup: Setup, remedies: Sequence[str], depth: int = 12, sizes: TrialSizes | None = None) -> pl.DataFrame:
    """Time steps: remedy · setting · depth · seed · quantity · value · refused, as trials have it, with the
    quantities `seconds_per_step` (forward, backward and the optimiser's), `ratio`, `parameters` and
    `parameters_added`. The setting is the first that takes the remedy, `pre` if it does; the ratio is to no
    remedy in the same, which is in the table too."""
    sizes = sizes or (FULL if setup.full else QUICK).sizes
    steps = WARM + ROUNDS * STEPS
    chosen = [Trial(remedy, "", depth, (0,), replace(sizes, steps=steps)) for remedy in remedies]
    key = {"remedies": list(remedies), "depth": depth, "sizes": str(sizes)}
    return setup.cached("costs", lambda: _timed(chosen, setup.device), **key)


def _timed(trials: Sequence[Trial], device: str) -> pl.DataFrame:
    """All of them, and those without a remedy that they are compared with."""
    rows: list[tuple[object, ...]] = []
    running: dict[Trial, Training] = {}
    with threads_set(1):
        for trial in trials:
            fit, outcome = _fitted(trial, device)
            if isinstance(outcome, Training):
                running[fit] = outcome
            else:
                rows.append((trial.remedy, None, trial.depth, None, None, None, outcome))
        for base in {replace(fit, remedy=NONE) for fit in running} - {*running}:
            running[base] = base.training(device)
        seconds = step_seconds(running, device)
    counts = {fit: sum(tensor.numel() for tensor in run.models[0].parameters()) for fit, run in running.items()}
    for fit, count in counts.items():
        base = replace(fit, remedy=NONE)
        quantities = {
            "seconds_per_step": median(seconds[fit]),
            "ratio": median(mine / theirs for mine, theirs in zip(seconds[fit], seconds[base], strict=True)),
            "parameters": count,
            "parameters_added": count - counts[base],
        }
        key = fit.remedy, fit.setting, fit.depth, fit.seeds[0]
        rows += [(*key, quantity, value, None) for quantity, value in quantities.items()]
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def _fitted(trial: Trial, device: str) -> tuple[Trial, Training | str]:
    """The training in the first setting that takes the remedy; else why the last does not."""
    refusal = ""
    for setting in SETTINGS:
        fit = replace(trial, setting=setting)
        try:
            return fit, fit.training(device)
        except ArchitectureError as error:
            refusal = str(error)
    return trial, refusal


def step_seconds(
    trainings: dict[Key, Training], device: str, warm: int = WARM, steps: int = STEPS, rounds: int = ROUNDS
) -> dict[Key, list[float]]:
    """Seconds of a step of each training, by round, with all that a GPU has still to do. Trainings take turns, so that
    a busy machine slows all of them alike.

    Args:
        trainings: Trainings by any key, with `warm + rounds * steps` steps or more left.
        device: Where they run.
        warm: Steps of each training before the first round.
        steps: Steps of each training in a round.
        rounds: How many rounds are timed.
    """
    started = {key: iter(training) for key, training in trainings.items()}
    seconds: dict[Key, list[float]] = {key: [] for key in started}
    for count in (warm, *[steps] * rounds):
        for key, running in started.items():
            start = time.perf_counter()
            for _ in islice(running, count):
                pass
            if torch.device(device).type == "cuda":
                torch.cuda.synchronize()
            seconds[key].append((time.perf_counter() - start) / count)
    return {key: by_round[1:] for key, by_round in seconds.items()}

"""What remedies do to networks that are trained from scratch, and what their steps cost: tables over
remedies, settings, depths and seeds (`lab/trial.py` says what is in them).

Each remedy in each setting at each depth is a piece of work by itself, cached in `FOLDER/parts` when it is
done; a run that is killed loses those that it was at.

Costs are the time of a training step, as a ratio to that without a remedy, and parameters. Networks of all
remedies are trained in turn, a few steps each, again and again, so that a busy machine slows them alike; of
each the median of the rounds is taken, of times and of ratios within a round. Nothing else should run on the
machine.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from statistics import median

import polars as pl
import torch

from rankscope.errors import ArchitectureError, StudyError
from rankscope.lab import Training
from rankscope.lab.trial import NONE, SCHEMA, SETTINGS, SIGMA, Trial, TrialSizes
from rankscope.remedies import REMEDIES
from rankscope.runs import tables
from rankscope.studies.study import Setup
from rankscope.workers import PieceResult, run_pieces, threads_set

EVERY = (NONE, *REMEDIES, SIGMA)


@dataclass(frozen=True)
class TrainingPlan:
    """What is trained, where nothing else is asked for."""

    settings: tuple[str, ...]
    depths: tuple[int, ...]
    sizes: TrialSizes


FULL = TrainingPlan(tuple(SETTINGS), (6, 12, 24, 48), TrialSizes())
SLOWER = TrainingPlan(("post", "no skips"), (24,), TrialSizes(lr=3e-4))
"""Where depth decides who learns: whether a smaller learning rate changes who."""
QUICK = TrainingPlan(("pre",), (2, 6), TrialSizes(width=64, context=32, batch=8, steps=60, evaluation_samples=64))
ROUNDS, STEPS, WARM = 15, 3, 6
"""Rounds, steps of each network in a round, and steps before the first."""


def trained(
    setup: Setup,
    remedies: Sequence[str] = EVERY,
    seeds: Sequence[int] = (0, 1, 2),
    *,
    settings: Sequence[str] | None = None,
    depths: Sequence[int] | None = None,
    steps: int | None = None,
    sizes: TrialSizes | None = None,
    workers: int = 1,
    minutes: float = math.inf,
) -> pl.DataFrame:
    """Train networks with each remedy: remedy · setting · depth · seed · quantity · value · refused.

    Args:
        setup: Where tables are cached, on what is trained, and the size of what is left out below.
        remedies: As `--remedy` has them; "none", and "sigmareparam".
        seeds: Networks of each remedy, setting and depth.
        settings: Of `lab.trial.SETTINGS`.
        depths: Layers of the networks.
        steps: Of each training.
        sizes: Of networks and their training.
        workers: Processes at a time.
        minutes: What failed, or was not begun within these, has a row that says so; the next call does it.
    """
    plan = FULL if setup.full else QUICK
    chosen = sizes or plan.sizes
    chosen = chosen if steps is None else replace(chosen, steps=steps)
    trials = [
        Trial(remedy, setting, depth, tuple(seeds), chosen)
        for remedy, setting, depth in product(remedies, settings or plan.settings, depths or plan.depths)
    ]
    if len(set(trials)) < len(trials):
        raise StudyError(
            f"remedies, settings and depths must be different ones; got {', '.join(remedies)}", subject="remedies"
        )
    until = time.time() + 60 * minutes
    work = partial(_cached_table, setup.folder, setup.full, setup.device, until)
    done: dict[Trial, pl.DataFrame] = {}
    processes = workers if workers > 1 else 0
    for result in run_pieces(work, trials, processes, cost=lambda trial: trial.depth, deadline=until):
        done[result.piece] = _table(result)
        setup.say(_line(result, len(done), len(trials)))
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
    for part in sorted(Path(folder).glob("parts/*.parquet")):
        if not part.name.startswith(("trained-", "at=")):
            continue
        table, manifest = tables.read_parquet(part)
        if manifest is None or manifest.key is None:
            continue
        key = manifest.key
        how, seeds = key["settings"]["sizes"], ", ".join(map(str, key["settings"]["seeds"]))
        sentence = (
            f"of width {how['width']}, {how['heads']} heads, {how['steps']} steps of AdamW, batches of "
            f"{how['batch']}, learning rate {how['lr']:g}, seeds {seeds} ({key['device']})"
        )
        networks[sentence] = networks.get(sentence, 0) + len(table.filter(quantity="diverged"))
    return [f"Trained: {count} networks {sentence}." for sentence, count in networks.items() if count]


def _cached_table(folder: Path, full: bool, device: str, until: float, trial: Trial) -> pl.DataFrame:
    """A trial's table, from the folder where it has been done."""
    settings = asdict(trial)
    return Setup(folder, full, device).cached(trial.name, lambda: trial.table(device, until), **settings)


def _table(result: PieceResult[Trial, pl.DataFrame]) -> pl.DataFrame:
    return _failed(result.piece, result.error or "") if result.value is None else result.value


def _failed(trial: Trial, why: str) -> pl.DataFrame:
    row = (trial.remedy, trial.setting, trial.depth, None, None, None, f"not run: {why}")
    return pl.DataFrame([row], schema=SCHEMA, orient="row")


def _line(result: PieceResult[Trial, pl.DataFrame], done: int, of: int) -> str:
    """What one says of a trial that has ended."""
    trial, table = result.piece, _table(result)
    losses, diverged = (table.filter(quantity=name)["value"] for name in ("loss", "diverged"))
    if table["quantity"].null_count():
        outcome = table["refused"][0]
    else:
        listed = ", ".join(f"{loss:.3f}" for loss in losses)
        outcome = f"loss {listed or 'none'}, {int(diverged.sum())} diverged"
    return f"{done}/{of} {result.seconds:6.1f} s  {trial.remedy}, {trial.setting}, {trial.depth}: {outcome}"


def costs(
    setup: Setup, remedies: Sequence[str] = EVERY, depth: int = 12, *, sizes: TrialSizes | None = None
) -> pl.DataFrame:
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
        count, without = _parameters(training), _parameters(running[base])
        quantities = {
            "seconds_per_step": median(seconds[fit]), "ratio": ratio, "parameters": count,
            "parameters_added": count - without,
        }  # fmt: skip
        key = fit.remedy, fit.setting, fit.depth, fit.seeds[0]
        rows += [(*key, quantity, value, None) for quantity, value in quantities.items()]
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def _fitted(trial: Trial, device: str) -> tuple[Trial, Training | None, str]:
    """In the first setting that takes it; else why the last does not."""
    refusal = ""
    for setting in SETTINGS:
        fit = replace(trial, setting=setting)
        try:
            return fit, fit.training(device), ""
        except ArchitectureError as error:
            refusal = str(error)
    return trial, None, refusal


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


def _advanced(steps: Iterator[int], count: int, device: str) -> float:
    """Seconds for so many steps, with all that a GPU has still to do."""
    start = time.perf_counter()
    for _ in islice(steps, count):
        pass
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _parameters(training: Training) -> int:
    return sum(parameter.numel() for parameter in training.models[0].parameters())

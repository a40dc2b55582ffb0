"""Networks and trainings of the question `does-it-pay`, and what is measured of them: rows of its tables.

`operations_row` counts what a step costs, `times` takes its seconds, `fresh_rows` measures networks before training,
and `trained_rows` trains the networks of one cell, to choose a rate or at the chosen one. `does_it_pay.py`, which calls
them, says what they are for; `pay_results.py` reads their rows. Operations are the same on every machine, where seconds
of small networks are mostly those of starting kernels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import polars as pl
import torch
from torch.utils.flop_counter import FlopCounterMode

from rankscope.lab import Training, release_memory
from rankscope.profiles import measure
from rankscope_studies.remedies.trainings import step_seconds
from rankscope_studies.trial import NONE, Trial, TrialSizes, gradients, train_until

SETTINGS = ("pre", "post", "no skips")
SKIP_WEIGHTS = ("sqrtl",)  # Remedies that are a weight of skips: without skips they are nothing
RESIDUAL = "relative_residual"
TUNING = 100  # The first of the seeds that learning rates and the best remedy are chosen on
FRESH = 200  # The first of the seeds that are reported: neither those nor the seeds of the table of remedies (0 to 2)
ANY_RATE = 1e-3  # Of networks that are counted, measured or timed before they have a rate
TUNED, REPORTED, LONGER, MORE = "tuning", "reported", "longer", "more compute"
CELL = {"setting": pl.String, "width": pl.Int64, "remedy": pl.String}
ROWS = {
    "arm": pl.String, **CELL, "rate": pl.Float64, "steps": pl.Int64, "seed": pl.Int64, "loss": pl.Float64,
    "residual": pl.Float64,
}  # fmt: skip
COSTS = CELL | {"operations": pl.Float64, "blind": pl.Float64}
FRESH_ROWS = CELL | {"seed": pl.Int64, "residual": pl.Float64, "gradient": pl.Float64}
TIMES = {"remedy": pl.String, "round": pl.Int64, "ratio": pl.Float64}


class PayCell(NamedTuple):
    """A cell of the experiment: networks that differ by their seeds alone."""

    setting: str
    width: int
    remedy: str

    def __str__(self) -> str:
        return " ".join(map(str, self))

    def rows(self, table: pl.DataFrame) -> pl.DataFrame:
        """The rows of a table that are of this cell."""
        return table.filter(**self._asdict())


@dataclass(frozen=True)
class PaySizes:
    """How large the experiment is."""

    remedies: tuple[str, ...]  # Beside the baseline
    depth: int
    widths: tuple[int, ...]
    heads: int
    context: int
    batch: int
    steps: int  # Of the baseline
    longer: int  # So many times the steps, at the first width
    rates: tuple[float, ...]
    tuning_seeds: int
    seeds: int
    samples: int  # Held-out samples that residuals are measured on
    timed_steps: int  # Of each of five rounds

    def conditions(self, setting: str) -> tuple[str, ...]:
        """The baseline, and the remedies that change a network of this setting."""
        return (NONE, *(name for name in self.remedies if setting != "no skips" or name not in SKIP_WEIGHTS))

    @property
    def cells(self) -> list[PayCell]:
        """Every cell: setting by setting, width by width, the baseline first."""
        return [
            PayCell(setting, width, remedy)
            for setting in SETTINGS for width, remedy in product(self.widths, self.conditions(setting))
        ]  # fmt: skip

    def at_end(self, rate: float) -> bool:
        """True if a rate is an end of the grid: a better one may lie beyond."""
        return rate in (min(self.rates), max(self.rates))

    @property
    def fresh_seeds(self) -> range:
        """Seeds of networks that are reported: none of them chose a rate or a remedy."""
        return range(FRESH, FRESH + self.seeds)

    def trial(self, cell: PayCell, rate: float, steps: int, seeds: Sequence[int]) -> Trial:
        """The trial of the networks of a cell at one learning rate."""
        sizes = TrialSizes(
            width=cell.width, heads=self.heads, context=self.context, batch=self.batch, steps=steps, lr=rate,
            probe_samples=self.samples,
        )  # fmt: skip
        return Trial(cell.remedy, cell.setting, self.depth, tuple(seeds), sizes)


def operations(trial: Trial) -> int:
    """Operations of the matrix products of one sample, forward and backward, as torch counts them."""
    training = trial.training()
    batch = training.task.batch(1, 0, 0)
    with FlopCounterMode(display=False) as counter:
        logits = training.models[0](batch.inputs, batch.padding)
        training.task.loss(logits, batch).backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())


def operations_row(cell: PayCell, sizes: PaySizes) -> pl.DataFrame:
    """The operations of one sample, and the loss of a guess by frequency: columns of `COSTS`."""
    trial = sizes.trial(cell, ANY_RATE, 1, [0])
    return pl.DataFrame([(*cell, float(operations(trial)), trial.task.blind)], schema=COSTS, orient="row")


def ratio(costs: pl.DataFrame, cell: PayCell) -> float:
    """Operations of a cell's network over those of its baseline."""
    remedied, baseline = (network.rows(costs)["operations"][0] for network in (cell, cell._replace(remedy=NONE)))
    return float(remedied / baseline)


def equal_steps(costs: pl.DataFrame, cell: PayCell, steps: int) -> int:
    """The steps that take as many operations as `steps` of the baseline."""
    return max(1, round(steps / ratio(costs, cell)))


def trained_rows(
    arm: str, cell: PayCell, rate: float, steps: int, sizes: PaySizes, device: str = "cpu"
) -> pl.DataFrame:
    """Held-out loss, and but for tuning log10 of the relative residual, of every seed of a cell at one rate.

    Args:
        arm: What the training is for; tuning has seeds of its own, and no residuals.
        cell: Setting, width and remedy.
        rate: The learning rate.
        steps: How many steps are made.
        sizes: The sizes of the experiment.
        device: Where networks are trained.

    Returns:
        Columns of `ROWS`; the loss of a training that diverged is infinite.
    """
    seeds = range(TUNING, TUNING + sizes.tuning_seeds) if arm == TUNED else sizes.fresh_seeds
    trial = sizes.trial(cell, rate, steps, seeds)
    training = trial.training(device)
    alive = train_until(training)
    losses = [evaluation.loss for evaluation in training.evaluate(trial.sizes.evaluation_samples)]
    finite = [lived and math.isfinite(loss) for lived, loss in zip(alive, losses, strict=True)]
    residuals = [None] * len(losses) if arm == TUNED else last_residuals(training, sizes.samples, finite)
    del training
    release_memory(device)
    rows = [
        (arm, *cell, rate, steps, seed, loss if converged else math.inf, residual)
        for seed, loss, converged, residual in zip(seeds, losses, finite, residuals, strict=True)
    ]
    return pl.DataFrame(rows, schema=ROWS, orient="row")


def last_residuals(training: Training, samples: int, finite: Sequence[bool]) -> list[float | None]:
    """log10 of the relative residual after the last layer of each network, in deviation arithmetic on the CPU.

    Args:
        training: The networks, before or after their training.
        samples: Held-out samples, over which the mean is taken.
        finite: For each network, whether it has not diverged.

    Returns:
        None where a network has diverged, or rounding decided its residual.
    """
    residuals: list[float | None] = []
    for converged, net, X in zip(finite, training.networks(), training.tokens(samples)[0], strict=True):
        mean = math.nan
        if converged:
            profile = measure(net.to(torch.float64, "cpu"), X.double().cpu(), metrics=RESIDUAL)
            logs, marks = (profile.curve(RESIDUAL, column)[:, -1] for column in ("log10", "below_floor"))
            mean = math.nan if bool((marks == 1).any()) else float(logs.mean())
        residuals.append(mean if math.isfinite(mean) else None)
    return residuals


def fresh_rows(cell: PayCell, sizes: PaySizes) -> pl.DataFrame:
    """log10 of the relative residual, and of the norm of the loss's gradient at the first layer, of the networks that
    are reported, before they are trained: columns of `FRESH_ROWS`."""
    training = sizes.trial(cell, ANY_RATE, 1, sizes.fresh_seeds).training()
    residuals = last_residuals(training, sizes.samples, [True] * sizes.seeds)
    probe = training.task.held_out(sizes.samples)
    rows = []
    for seed, residual, model in zip(sizes.fresh_seeds, residuals, training.models, strict=True):
        _, _, gradient, _ = next(gradients(seed, training.task, model, probe, "start"))  # the first layer comes first
        rows.append((*cell, seed, residual, gradient))
    return pl.DataFrame(rows, schema=FRESH_ROWS, orient="row")


def best_tuned(tuning: pl.DataFrame, cell: PayCell) -> tuple[float, float]:
    """(rate, loss) of the lowest median loss over tuning seeds; of equal losses, that of the smaller rate."""
    medians = cell.rows(tuning).group_by("rate").agg(pl.col("loss").median())
    rate, loss = medians.sort("loss", "rate").row(0)
    return float(rate), float(loss)


def times(sizes: PaySizes, device: str = "cpu") -> pl.DataFrame:
    """Seconds of a training step over the baseline's, pre-norm, in rounds that take turns: columns of `TIMES`."""
    rounds, warm = 5, 4  # A GPU records a step after three
    count = warm + rounds * sizes.timed_steps
    trainings = {
        name: sizes.trial(PayCell("pre", sizes.widths[0], name), ANY_RATE, count, [0]).training(device)
        for name in sizes.conditions("pre")
    }
    seconds = step_seconds(trainings, device, warm, sizes.timed_steps, rounds)
    del trainings
    release_memory(device)
    rows = [
        (name, k, taken / baseline)
        for name, by_round in seconds.items()
        for k, (taken, baseline) in enumerate(zip(by_round, seconds[NONE], strict=True))
    ]
    return pl.DataFrame(rows, schema=TIMES, orient="row")

"""Does preventing collapse pay? Remedies against a baseline of equal compute, each at a learning rate of its own.

The table of remedies (`docs/remedies.md`) has one recipe for all: a remedy may look good because the baseline's rate is
wrong for it, or because its step costs more than the baseline's. Here every network, the baseline among them, gets

- the same compute: its steps are those of the baseline divided by its operations over the baseline's. Operations of
  matrix products, forward and backward, are counted by torch (`FlopCounterMode`): the same on every machine, where
  seconds of small networks are mostly those of starting kernels. Seconds are measured beside;
- the same tuning: every rate of one grid on tuning seeds; the rate of the lowest median loss is
  reported on other seeds.

Two widths, and one longer training at the first. A second baseline trains for 1.5 times the steps. Beating it cannot be
explained by costs FLOPs do not count, unless a step takes more than 1.5 times as long.

Less collapse is a larger relative residual after the last layer: after training, where it may be a result of learning
as well as its cause, and before, where it can be a cause alone. NeuTRENO and value residual also lead the values of the
first layer past all others: a shortcut, as a skip is. Whether that is what helps is seen by the gradient that the first
layer gets before training, which stands beside the residual.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations, product
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import torch
from scipy.stats import rankdata
from torch.utils.flop_counter import FlopCounterMode

from rankscope.errors import StudyError
from rankscope.lab import Training
from rankscope.lab.trial import NONE, Trial, TrialSizes, free_memory, gradients, train_until
from rankscope.profiles import measure
from rankscope.studies.questions.question import HypothesisVerdict, Question, StudyAnswer, Tables
from rankscope.studies.questions.summaries import rank_correlation, spread, spread_of_logs
from rankscope.studies.remedies.trainings import step_seconds
from rankscope.studies.study import PageTable, Setup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SETTINGS = ("pre", "post", "no skips")
HARMED = ("post", "no skips")  # Settings in which the table of remedies has a baseline of 24 layers that learns nothing
SKIP_WEIGHTS = ("sqrtl",)  # Remedies that are a weight of skips: without skips they are nothing
RESIDUAL = "relative_residual"
TUNING = 100  # The first of the seeds that learning rates and the best remedy are chosen on
FRESH = 200  # The first of the seeds that are reported: neither those nor the seeds of the table of remedies (0 to 2)
ANY_RATE = 1e-3  # Of networks that are counted, measured or timed before they have a rate
TUNED, REPORTED, LONGER, MORE = "tuning", "reported", "longer", "more compute"
EXTRA = 1.5  # Of the baseline's compute, for the baseline that is given more
LEARNS = 0.1  # Nats below a guess by frequency, and more than seeds differ: from there on a network learns
MATTERS = 0.01  # Nats: a smaller gain is none, though seeds should agree on it
RELATED, CHANCE = 0.7, 0.05  # Rank correlation, and its p, from which on residual and loss are said to go together
DRAWS = 1000  # Of seeds, for the interval of a rank correlation
LEAST_ORDERED = 5  # Networks: of fewer, even a perfect order comes by chance with a p above `CHANCE`
MOST_EXACT = 8  # Conditions whose orders are all enumerated
ROWS = {
    "arm": pl.String, "setting": pl.String, "width": pl.Int64, "remedy": pl.String, "rate": pl.Float64,
    "steps": pl.Int64, "seed": pl.Int64, "loss": pl.Float64, "residual": pl.Float64,
}  # fmt: skip
CHANGED = (
    "Changed after a quick run was seen (4 layers, 50 steps, widths 16 and 24), before any full one. In rank "
    "correlations losses that differ by less than what matters count as equal, since networks that learn nothing "
    "would else be ordered by chance; a correlation that is large enough, but whose p is not small, is not judged, "
    "and neither are fewer than five networks. The grids of rates moved, since many networks chose an end. Changed "
    "after a full run was seen: reported seeds are new; 'yes' asks that the remedy, chosen on tuning seeds, also has "
    "the larger residual and beats the baseline with more compute; a baseline that diverges can be beaten; one at an "
    "end of the grid is not said to learn nothing; 1/√L, a weight of skips, is left out where there are none."
)
COSTS = {
    "setting": pl.String, "width": pl.Int64, "remedy": pl.String, "operations": pl.Float64, "blind": pl.Float64,
}  # fmt: skip
FRESH_ROWS = {name: ROWS[name] for name in ("setting", "width", "remedy", "seed", "residual")} | {
    "gradient": pl.Float64
}
TIMES = {"remedy": pl.String, "round": pl.Int64, "ratio": pl.Float64}


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
    def cells(self) -> list[tuple[str, int, str]]:
        """Setting, width and remedy of every network."""
        return [(setting, *rest) for setting in SETTINGS for rest in product(self.widths, self.conditions(setting))]

    def at_end(self, rate: float) -> bool:
        """True if a rate is an end of the grid: a better one may lie beyond."""
        return rate in (min(self.rates), max(self.rates))

    @property
    def fresh_seeds(self) -> range:
        """Seeds of networks that are reported: none of them chose a rate or a remedy."""
        return range(FRESH, FRESH + self.seeds)

    def trial(self, setting: str, width: int, remedy: str, rate: float, steps: int, seeds: Sequence[int]) -> Trial:
        """The trial of one network at one rate."""
        sizes = TrialSizes(
            width=width, heads=self.heads, context=self.context, batch=self.batch, steps=steps, lr=rate,
            probe_samples=self.samples,
        )  # fmt: skip
        return Trial(remedy, setting, self.depth, tuple(seeds), sizes)


QUICK = PaySizes(
    ("neutreno", "valueresidual", "gate", "contranorm"), depth=3, widths=(24, 32), heads=4, context=16, batch=16,
    steps=60, longer=2, rates=(3e-3, 1e-2, 3e-2), tuning_seeds=1, seeds=2, samples=1, timed_steps=2,
)  # fmt: skip
FULL = PaySizes(
    ("neutreno", "valueresidual", "sqrtl", "gate", "differential2", "contranorm"), depth=24, widths=(64, 128), heads=4,
    context=64, batch=32, steps=300, longer=4, rates=(2e-4, 7e-4, 2.3e-3, 8e-3, 2.7e-2), tuning_seeds=2, seeds=4,
    samples=1, timed_steps=5,
)  # fmt: skip


def gather(setup: Setup, sizes: PaySizes) -> dict[str, pl.DataFrame]:
    """Count operations, tune every network, and train it at its rate: a cached piece for each network and rate.

    Raises:
        StudyError: There are too few rates to tune, or too few seeds to have a spread.
    """
    if len({*sizes.rates}) < 3 or sizes.seeds < 2:
        wanted = "rates must be at least 3 different ones, and seeds at least 2"
        raise StudyError(f"{wanted}; got {len({*sizes.rates})} and {sizes.seeds}", subject="sizes")
    key = {"depth": sizes.depth, "heads": sizes.heads, "context": sizes.context}
    cells = sizes.cells
    counted: dict[str, Callable[[], pl.DataFrame]] = {
        f"operations {setting} {width} {remedy}": partial(operations_row, setting, width, remedy, sizes)
        for setting, width, remedy in cells
    }
    fresh: dict[str, Callable[[], pl.DataFrame]] = {
        f"fresh {setting} {width} {remedy}": partial(fresh_rows, setting, width, remedy, sizes)
        for setting, width, remedy in cells
    }
    tables = {
        "costs": setup.cached_parts(counted, **key),
        "fresh": setup.cached_parts(fresh, **key, seeds=[*sizes.fresh_seeds], samples=sizes.samples),
        "times": setup.cached("times", lambda: times(sizes, setup.device), **key, **{
            "batch": sizes.batch, "width": sizes.widths[0], "remedies": sizes.remedies, "steps": sizes.timed_steps,
        }),
    }  # fmt: skip
    key |= {"batch": sizes.batch}
    steps = {cell: equal_steps(tables["costs"], *cell, sizes.steps) for cell in cells}
    tuning = {
        _name(TUNED, cell, rate, steps[cell]): partial(trained, TUNED, cell, rate, steps[cell], sizes, setup.device)
        for cell in cells for rate in sizes.rates
    }  # fmt: skip
    tables["tuning"] = setup.cached_parts(tuning, **key, seeds=sizes.tuning_seeds)
    final = {}
    for cell in cells:
        _, width, remedy = cell
        rate = best_rate(tables["tuning"], *cell)
        arms = {REPORTED: steps[cell]}
        arms |= {LONGER: sizes.longer * steps[cell]} if width == sizes.widths[0] else {}
        arms |= {MORE: round(EXTRA * steps[cell])} if remedy == NONE else {}
        for arm, count in arms.items():
            final[_name(arm, cell, rate, count)] = partial(trained, arm, cell, rate, count, sizes, setup.device)
    tables["runs"] = setup.cached_parts(final, **key, seeds=[*sizes.fresh_seeds], samples=sizes.samples)
    return tables


def _name(arm: str, cell: tuple[str, int, str], rate: float, steps: int) -> str:
    return f"{arm} {' '.join(map(str, cell))} {steps} at {rate:g}"


def operations(trial: Trial) -> int:
    """Operations of the matrix products of one sample, forward and backward, as torch counts them."""
    training = trial.training()
    batch = training.task.batch(1, 0, 0)
    with FlopCounterMode(display=False) as counter:
        logits = training.models[0](batch.inputs, batch.padding)
        training.task.loss(logits, batch).backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())


def operations_row(setting: str, width: int, remedy: str, sizes: PaySizes) -> pl.DataFrame:
    """The operations of one sample, and the loss of a guess by frequency: setting · width · remedy · operations ·
    blind."""
    trial = sizes.trial(setting, width, remedy, ANY_RATE, 1, [0])
    row = (setting, width, remedy, float(operations(trial)), trial.task.blind)
    return pl.DataFrame([row], schema=COSTS, orient="row")


def ratio(costs: pl.DataFrame, setting: str, width: int, remedy: str) -> float:
    """Operations with a remedy over those of the baseline."""
    mine, base = (costs.filter(setting=setting, width=width, remedy=name)["operations"][0] for name in (remedy, NONE))
    return float(mine / base)


def equal_steps(costs: pl.DataFrame, setting: str, width: int, remedy: str, steps: int) -> int:
    """The steps that take as many operations as `steps` of the baseline."""
    return max(1, round(steps / ratio(costs, setting, width, remedy)))


def trained(
    arm: str, cell: tuple[str, int, str], rate: float, steps: int, sizes: PaySizes, device: str = "cpu"
) -> pl.DataFrame:
    """Held-out loss, and but for tuning log10 of the relative residual, of every seed of one network at one rate.

    Args:
        arm: What the training is for; tuning has seeds of its own, and no residuals.
        cell: Setting, width and remedy.
        rate: The learning rate.
        steps: How many steps are made.
        sizes: The sizes of the experiment.
        device: Where networks are trained.
    """
    seeds = range(TUNING, TUNING + sizes.tuning_seeds) if arm == TUNED else sizes.fresh_seeds
    trial = sizes.trial(*cell, rate, steps, seeds)
    training = trial.training(device)
    alive = train_until(training)
    losses = [found.loss for found in training.evaluate(trial.sizes.evaluation_samples)]
    well = [lived and math.isfinite(loss) for lived, loss in zip(alive, losses, strict=True)]
    left = [None] * len(losses) if arm == TUNED else residuals(training, sizes.samples, well)
    del training
    free_memory(device)
    rows = [
        (arm, *cell, rate, steps, seed, loss if lived else math.inf, residual)
        for seed, loss, lived, residual in zip(seeds, losses, well, left, strict=True)
    ]
    return pl.DataFrame(rows, schema=ROWS, orient="row")


def residuals(training: Training, samples: int, well: Sequence[bool]) -> list[float | None]:
    """log10 of the relative residual after the last layer of each network, in deviation arithmetic on the CPU, the mean
    over held-out samples; None where the network is not well, or rounding decided."""
    found: list[float | None] = []
    for lived, net, X in zip(well, training.networks(), training.tokens(samples)[0], strict=True):
        if not lived:
            found.append(None)
            continue
        profile = measure(net.to(torch.float64, "cpu"), X.double().cpu(), metrics=RESIDUAL)
        logs, marks = (profile.curve(RESIDUAL, column)[:, -1] for column in ("log10", "below_floor"))
        mean = float(logs.mean())
        found.append(None if bool((marks == 1).any()) or not math.isfinite(mean) else mean)
    return found


def fresh_rows(setting: str, width: int, remedy: str, sizes: PaySizes) -> pl.DataFrame:
    """log10 of the relative residual, and of the norm of the loss's gradient at the first layer, of networks before
    they are trained, of every seed that is reported."""
    training = sizes.trial(setting, width, remedy, ANY_RATE, 1, sizes.fresh_seeds).training()
    left = residuals(training, sizes.samples, [True] * sizes.seeds)
    probe = training.task.held_out(sizes.samples)
    rows = []
    for seed, value, model in zip(sizes.fresh_seeds, left, training.models, strict=True):
        first = next(gradients(seed, training.task, model, probe, "start"))
        rows.append((setting, width, remedy, seed, value, first[2]))
    return pl.DataFrame(rows, schema=FRESH_ROWS, orient="row")


def best_rate(tuning: pl.DataFrame, setting: str, width: int, remedy: str) -> float:
    """The rate of the lowest median loss over tuning seeds; the smaller one where two are equal."""
    return _best_tuned(tuning, setting, width, remedy)[0]


def _best_tuned(tuning: pl.DataFrame, setting: str, width: int, remedy: str) -> tuple[float, float]:
    """(rate, loss) of the lowest median loss over tuning seeds."""
    rows = tuning.filter(setting=setting, width=width, remedy=remedy)
    rate, loss = rows.group_by("rate").agg(pl.col("loss").median()).sort("loss", "rate").row(0)
    return float(rate), float(loss)


def times(sizes: PaySizes, device: str = "cpu") -> pl.DataFrame:
    """Seconds of a training step over the baseline's, pre-norm, in rounds that take turns: remedy · round · ratio."""
    rounds, warm = 5, 4  # A GPU records a step after three
    count = warm + rounds * sizes.timed_steps
    running = {
        name: sizes.trial("pre", sizes.widths[0], name, ANY_RATE, count, [0]).training(device)
        for name in sizes.conditions("pre")
    }
    seconds = step_seconds(running, device, warm, sizes.timed_steps, rounds)
    del running
    free_memory(device)
    rows = [
        (name, k, mine / base)
        for name, found in seconds.items()
        for k, (mine, base) in enumerate(zip(found, seconds[NONE], strict=True))
    ]
    return pl.DataFrame(rows, schema=TIMES, orient="row")


# ---- The answer, from tables alone


@dataclass(frozen=True)
class CellResult:
    """What came of one network at its rate, by seed in their order."""

    losses: tuple[float, ...]  # Infinite where a training diverged
    residuals: tuple[float | None, ...]  # log10, after training
    rate: float
    steps: int

    @property
    def loss(self) -> float:
        """The median over seeds."""
        return statistics.median(self.losses)

    @property
    def range(self) -> float:
        """What seeds that did not diverge differ by; 0 if there are none."""
        finite = [loss for loss in self.losses if math.isfinite(loss)]
        return max(finite) - min(finite) if finite else 0.0

    @property
    def residual(self) -> float:
        """log10 of the residual after training, the median over seeds that have one; NaN where none has."""
        known = [value for value in self.residuals if value is not None]
        return statistics.median(known) if known else math.nan

    def learns(self, blind: float) -> bool:
        """True if the worst seed beats a guess by `LEARNS` nats and by more than seeds differ."""
        return len(self.losses) > 1 and blind - max(self.losses) > max(self.range, LEARNS)

    def beats(self, other: "CellResult", blind: float) -> bool:
        """True if this network learns, its worst seed is better than the other's best, and its median is lower by
        `MATTERS` nats and by more than the seeds of either differ."""
        apart = max(self.losses) < min(other.losses)
        return self.learns(blind) and apart and other.loss - self.loss > max(self.range, other.range, MATTERS)


@dataclass(frozen=True)
class PayResults:
    """All tables, asked by network."""

    tables: Tables
    sizes: PaySizes

    @property
    def blind(self) -> float:
        """The held-out loss of a guess by frequency."""
        return float(self.tables["costs"]["blind"][0])

    def cell(self, setting: str, width: int, remedy: str, arm: str = REPORTED) -> CellResult | None:
        """What came of a network; None where the tables do not have it."""
        rows = self.tables["runs"].filter(arm=arm, setting=setting, width=width, remedy=remedy).sort("seed")
        if rows.is_empty():
            return None
        losses, left = (tuple(rows[name].to_list()) for name in ("loss", "residual"))
        return CellResult(losses, left, float(rows["rate"][0]), int(rows["steps"][0]))

    def widths(self, arm: str) -> tuple[int, ...]:
        """Widths at which an arm was trained."""
        return self.sizes.widths[:1] if arm == LONGER else self.sizes.widths

    def complete(self, setting: str, arm: str = REPORTED) -> bool:
        """True if every network of a setting was trained."""
        return all(self.cell(setting, width, remedy, arm) is not None
                   for width in self.widths(arm) for remedy in self.sizes.conditions(setting))  # fmt: skip

    def any_learns(self, settings: Sequence[str] = SETTINGS) -> bool:
        """True if some reported network of these settings learns."""
        cells = [self.cell(*key) for key in self.sizes.cells if key[0] in settings]
        return any(cell is not None and cell.learns(self.blind) for cell in cells)

    def winners(self, setting: str, width: int, arm: str = REPORTED, against: str = "") -> list[str]:
        """Remedies that beat the tuned baseline of a setting, of the same arm or another one."""
        base = self.cell(setting, width, NONE, against or arm)
        cells = {remedy: self.cell(setting, width, remedy, arm) for remedy in self.sizes.remedies}
        return [
            remedy for remedy, mine in cells.items()
            if mine is not None and base is not None and mine.beats(base, self.blind)
        ]  # fmt: skip

    def winners_everywhere(self, setting: str, arm: str = REPORTED, against: str = "") -> list[str]:
        """Remedies that do so at every width of an arm."""
        found = [self.winners(setting, width, arm, against) for width in self.widths(arm)]
        return [remedy for remedy in self.sizes.remedies if all(remedy in names for names in found)]

    def gains(self, setting: str, remedy: str, arm: str = REPORTED) -> list[float]:
        """Nats that a remedy gains over the baseline, seed by seed, at all widths of an arm."""
        found = []
        for width in self.widths(arm):
            mine, base = (self.cell(setting, width, name, arm) for name in (remedy, NONE))
            if mine is not None and base is not None:
                pairs = zip(base.losses, mine.losses, strict=True)
                found += [b - a for b, a in pairs if math.isfinite(a) and math.isfinite(b)]
        return found

    def best(self, setting: str) -> str:
        """The remedy of the lowest loss on tuning seeds, the mean over widths: what reported seeds then show of it is
        not better for having been chosen."""
        tuning, widths = self.tables["tuning"], self.sizes.widths
        return min(
            self.sizes.conditions(setting)[1:],
            key=lambda name: sum(_best_tuned(tuning, setting, width, name)[1] for width in widths),
        )

    def less_collapsed(self, setting: str, remedy: str) -> bool:
        """True if a remedy's median residual after training exceeds the baseline's at every width."""
        pairs = [[self.cell(setting, width, name) for name in (remedy, NONE)] for width in self.sizes.widths]
        return all(mine is not None and base is not None and mine.residual > base.residual for mine, base in pairs)

    def relation(self, setting: str, width: int, when: str, arm: str = REPORTED) -> "Relation | None":
        """How residual (`trained` or `fresh`), or the first layer's gradient before training (`gradient`), and loss go
        together across the baseline and remedies of a setting; None where nothing learns, or too few networks have
        both for any order of theirs to be improbable."""
        pairs = []
        learnt = False
        for remedy in self.sizes.conditions(setting):
            cell = self.cell(setting, width, remedy, arm)
            if cell is None:
                continue
            learnt |= cell.learns(self.blind)
            fresh = self.tables["fresh"].filter(setting=setting, width=width, remedy=remedy).sort("seed")
            before = fresh["gradient" if when == "gradient" else "residual"]
            left = cell.residuals if when == "trained" else tuple(before.to_list())
            both = [(value, loss) for value, loss in zip(left, cell.losses, strict=True) if value is not None]
            if both:
                pairs.append(both)
        return relation(pairs) if learnt and len(pairs) >= LEAST_ORDERED else None


@dataclass(frozen=True)
class Relation:
    """A rank correlation of residual and loss, of medians over seeds."""

    rank: float
    p: float  # The share of all orders of the networks that have as large a rank correlation, of either sign
    low: float
    high: float  # 90% of the draws of seeds lie between

    @property
    def pays(self) -> bool | None:
        """True if a larger residual goes with a lower loss. None if the correlation is large enough but its p-value is
        not small."""
        return False if self.rank > -RELATED else True if self.p <= CHANCE else None

    @property
    def text(self) -> str:
        """The correlation, its interval and its p."""
        return f"{self.rank:.2f} [{self.low:.2f}, {self.high:.2f}], p = {self.p:.2g}"


def relation(pairs: Sequence[Sequence[tuple[float, float]]]) -> Relation | None:
    """The relation of residual and loss across networks; None where residuals do not vary. Losses are rounded to
    `MATTERS`, since what differs by less is equal; where all are, the correlation is 0.

    Args:
        pairs: For each network, residual and loss of every seed.

    Raises:
        StudyError: There are more networks than all orders of which can be enumerated.

    >>> found = relation([[(float(k), -float(k))] for k in range(4)])
    >>> found.rank, round(found.p * 24)
    (-1.0, 2)
    """
    if len(pairs) > MOST_EXACT:
        raise StudyError(f"networks must be at most {MOST_EXACT}; got {len(pairs)}", subject="remedies")
    medians = _rounded(np.array([np.median(np.array(seeds, dtype=float), axis=0) for seeds in pairs]))
    if len({*medians[:, 0].tolist()}) < 2:
        return None
    rank = rank_correlation(medians[:, 0].tolist(), medians[:, 1].tolist())
    rank = 0.0 if math.isnan(rank) else rank
    orders = np.array([*permutations(range(len(pairs)))])
    a, b = (rankdata(medians[:, k]) for k in (0, 1))
    chance = _pearson(np.broadcast_to(a, orders.shape), b[orders])
    p = float((np.abs(chance) >= abs(rank) - 1e-9).mean())
    draw = np.random.default_rng(0)
    drawn = _rounded(np.stack([
        np.median(np.array(seeds, dtype=float)[draw.integers(len(seeds), size=(DRAWS, len(seeds)))], axis=1)
        for seeds in pairs
    ], axis=1))  # fmt: skip
    ranks = _pearson(rankdata(drawn[..., 0], axis=1), rankdata(drawn[..., 1], axis=1))
    low, high = np.quantile(ranks, [0.05, 0.95])
    return Relation(rank, p, float(low), float(high))


def _rounded(pairs: Any) -> Any:
    """Residuals as they are, and losses in whole multiples of `MATTERS`."""
    return np.stack([pairs[..., 0], np.round(pairs[..., 1] / MATTERS)], axis=-1)


def _pearson(a: Any, b: Any) -> Any:
    """Pearson's correlation of rows; 0 where one does not vary."""
    a, b = a - a.mean(1, keepdims=True), b - b.mean(1, keepdims=True)
    sizes = np.sqrt((a**2).sum(1) * (b**2).sum(1))
    return (a * b).sum(1) / np.where(sizes > 0, sizes, 1.0)


def answer(tables: Tables, sizes: PaySizes) -> StudyAnswer:
    """The answer that the tables give."""
    results = PayResults(tables, sizes)
    verdicts = [
        _rate_verdict(results), _harmed_verdict(results), _pre_verdict(results),
        _relation_verdict(results, HARMED, "trained", True), _relation_verdict(results, HARMED, "fresh", True),
        _relation_verdict(results, ("pre",), "trained", False), _longer_verdict(results),
    ]  # fmt: skip
    evidence = [*(_setting_table(results, setting) for setting in SETTINGS), _relations(results), _rates(results)]
    chosen = [cell.rate for key in sizes.cells if (cell := results.cell(*key)) is not None]
    edge = sum(map(sizes.at_end, chosen))
    notes = [
        f"Rates {', '.join(f'{rate:g}' for rate in sizes.rates)} for every network, the baseline among them, chosen by "
        f"the median loss of {sizes.tuning_seeds} tuning seed{'s' * (sizes.tuning_seeds != 1)} and reported on "
        f"{sizes.seeds} other seeds; {edge} of {len(chosen)} networks chose an end of the grid. The longer training, "
        f"{sizes.longer} times as many steps at width {sizes.widths[0]}, and the baseline with {EXTRA:g} times the "
        "compute have the rates of the usual length.",
        f"A network learns if its worst seed beats a guess by frequency (loss {results.blind:.3f}) by {LEARNS:g} nats "
        "and by more than its seeds differ. A remedy beats the baseline if it learns, its worst seed is better than "
        f"the baseline's best, and medians are apart by {MATTERS:g} nats and by more than the seeds of either differ; "
        "it has to do so at both widths.",
        CHANGED,
    ]
    return StudyAnswer(_sentence(results), verdicts, evidence, notes)


def _sentence(results: PayResults) -> str:
    """Where remedies beat the tuned baseline, by how much, and whether less collapse goes with a lower loss."""
    known = [setting for setting in SETTINGS if results.complete(setting)]
    if not results.any_learns(known):
        return "Cannot be told: no network beats guessing, or no setting was trained with every remedy."
    parts, pays, prevents, others = [], [], [], []
    for setting in known:
        name = results.best(setting)
        gain = spread(results.gains(setting, name), "+.2f")
        bases = [results.cell(setting, width, NONE) for width in results.sizes.widths]
        idle = not any(base is not None and base.learns(results.blind) for base in bases)
        end = any(base is not None and results.sizes.at_end(base.rate) for base in bases)
        nothing = "learns nothing at an end of the grid" if end else "learns nothing"
        where = LABELS[setting] + (f", where the baseline {nothing}," if idle else "")
        won = results.winners_everywhere(setting)
        if not results.any_learns([setting]):
            parts.append(f"{LABELS[setting]} nothing learns")
        elif name not in won:
            others += won
            but = f", only {_listed(won)}" if won else ""
            parts.append(f"{where} tuning's best remedy, {name}, does not beat the baseline ({gain}){but}")
        else:
            less = results.less_collapsed(setting, name)
            more = name in results.winners_everywhere(setting, REPORTED, MORE)
            pays.append(setting)
            prevents += [setting] if less and more else []
            but = "" if less and more else f", not over {EXTRA:g}× compute" if less else ", no larger residual measured"
            parts.append(f"{where} {name} gains {gain} nats{but}")
    start = "Yes" if prevents == known else "It depends on the network" if prevents else "No"
    if not prevents and (pays or others):
        start = "A remedy pays, not by preventing collapse" if pays else "Not told"
    met = {setting: {*_met(results, setting, "trained")} for setting in known}
    related = [setting for setting in known if met[setting] == {True}]
    goes = "in no setting does a larger residual go with a lower loss at both widths"
    if any(None in found for found in met.values()):
        goes = "whether a larger residual goes with a lower loss is not told"
    if related:
        goes = f"a larger residual goes with a lower loss {_listed([LABELS[name] for name in related])}"
    return f"{start}: at equal compute and tuned rates, {'; '.join(parts)}; {goes}."


LABELS = {"pre": "pre-norm", "post": "post-norm", "no skips": "without skips"}


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""


def _met(results: PayResults, setting: str, when: str) -> list[bool | None]:
    """By width, whether a larger residual goes with a lower loss; None where that cannot be told."""
    found = [results.relation(setting, width, when) for width in results.sizes.widths]
    return [None if one is None else one.pays for one in found]


def _rate_verdict(results: PayResults) -> HypothesisVerdict:
    """Whether the baseline of settings that collapse learns nothing at its own rate either; not told where that rate is
    an end of the grid, or nothing learns at all."""
    cells = {
        f"{setting} {width}": results.cell(setting, width, NONE)
        for setting, width in product(HARMED, results.sizes.widths)
    }
    known = {name: cell for name, cell in cells.items() if cell is not None}
    ours = "; ".join(f"{name}: {spread(cell.losses, '.3f')} at {cell.rate:g}" for name, cell in known.items())
    if len(known) < len(cells):
        return HypothesisVerdict(ours or "not measured", None)
    if any(cell.learns(results.blind) for cell in known.values()):
        return HypothesisVerdict(ours, False)
    ends = [name for name, cell in known.items() if results.sizes.at_end(cell.rate)]
    ours += f" (an end of the grid: {_listed(ends)})" if ends else ""
    return HypothesisVerdict(ours, None if ends or not results.any_learns() else True)


def _harmed_verdict(results: PayResults) -> HypothesisVerdict:
    """Whether in settings that collapse some remedy beats both baselines at every width."""
    if not all(results.complete(setting) for setting in HARMED):
        return HypothesisVerdict("not measured", None)
    won, more = ({setting: results.winners_everywhere(setting, REPORTED, against) for setting in HARMED}
                 for against in ("", MORE))  # fmt: skip
    ours = "; ".join(
        f"{setting}: {_listed(won[setting]) or 'none'} ({_listed(more[setting]) or 'none'} where the baseline has "
        f"{EXTRA:g} times the compute)" for setting in HARMED
    )  # fmt: skip
    return HypothesisVerdict(ours, all({*won[setting]} & {*more[setting]} for setting in HARMED))


def _pre_verdict(results: PayResults) -> HypothesisVerdict:
    """Whether no remedy beats the baseline where that learns; not told where one does at one width alone."""
    if not results.complete("pre"):
        return HypothesisVerdict("not measured", None)
    by_width = {width: results.winners("pre", width) for width in results.sizes.widths}
    ours = "; ".join(f"width {width}: {_listed(names) or 'none'}" for width, names in by_width.items())
    more = results.winners_everywhere("pre", REPORTED, MORE)
    ours += f"; {_listed(more) or 'none'} where the baseline has {EXTRA:g} times the compute"
    name = results.best("pre")
    ours += f"; the best on tuning seeds is {name}, {spread(results.gains('pre', name), '+.3f')} nats"
    bases = [results.cell("pre", width, NONE) for width in results.sizes.widths]
    if not all(base is not None and base.learns(results.blind) for base in bases):
        return HypothesisVerdict(f"{ours}; the baseline does not learn", None)
    everywhere = results.winners_everywhere("pre")
    return HypothesisVerdict(ours, False if everywhere else None if any(by_width.values()) else True)


def _relation_verdict(results: PayResults, settings: Sequence[str], when: str, wanted: bool) -> HypothesisVerdict:
    """Whether residual and loss go together at every width of some settings, or (`wanted=False`) at none."""
    found = {
        f"{setting} {width}": results.relation(setting, width, when)
        for setting, width in product(settings, results.sizes.widths)
    }
    ours = "; ".join(f"{name}: {'not told' if one is None else one.text}" for name, one in found.items())
    met = {None if one is None else one.pays for one in found.values()}
    return HypothesisVerdict(ours, None if len(met) != 1 or met == {None} else met == {wanted})


def _longer_verdict(results: PayResults) -> HypothesisVerdict:
    """Whether after longer training remedies beat the baseline in the same settings as before it, at the same width."""
    if not all(results.complete(setting, arm) for setting in SETTINGS for arm in (REPORTED, LONGER)):
        return HypothesisVerdict("not measured", None)
    first = results.sizes.widths[0]
    pairs = {setting: [results.winners(setting, first, arm) for arm in (REPORTED, LONGER)] for setting in SETTINGS}
    ours = "; ".join(
        f"{setting}: {_listed(after) or 'none'} (before: {_listed(before) or 'none'})"
        for setting, (before, after) in pairs.items()
    )
    same = all(bool(before) == bool(after) for before, after in pairs.values())
    return HypothesisVerdict(ours, same if results.any_learns() else None)


def _setting_table(results: PayResults, setting: str) -> PageTable:
    """Every network of a setting: cost, rate, losses, gains and residuals."""
    sizes, rows = results.sizes, []
    times_of = results.tables["times"]
    for width, remedy in product(sizes.widths, sizes.conditions(setting)):
        cell = results.cell(setting, width, remedy)
        if cell is None:
            continue
        base = results.cell(setting, width, NONE)
        fresh = results.tables["fresh"].filter(setting=setting, width=width, remedy=remedy)
        longer = results.cell(setting, width, remedy, LONGER)
        gain = "–" if remedy == NONE or base is None else f"{base.loss - cell.loss:+.3f}"
        won = remedy != NONE and base is not None and cell.beats(base, results.blind)
        seconds = times_of.filter(remedy=remedy)["ratio"].to_list()
        rows.append([
            remedy, str(width), f"{ratio(results.tables['costs'], setting, width, remedy):.2f}",
            spread(seconds, ".2f") if setting == "pre" and width == sizes.widths[0] else "", str(cell.steps),
            f"{cell.rate:g}", spread(cell.losses, ".3f"), gain + (" **beats**" if won else ""),
            *(spread_of_logs(fresh[name].drop_nulls().to_list()) for name in ("gradient", "residual")),
            spread_of_logs([r for r in cell.residuals if r is not None]),
            "" if longer is None else spread(longer.losses, ".3f"),
        ])  # fmt: skip
    extra = [(width, cell) for width in sizes.widths if (cell := results.cell(setting, width, NONE, MORE)) is not None]
    more = "; ".join(f"width {width}: {spread(cell.losses, '.3f')}" for width, cell in extra)
    return PageTable(
        f"{setting}: {sizes.depth} layers, median (range) of {sizes.seeds} seeds",
        ["remedy", "width", "operations", "seconds", "steps", "rate", "held-out loss", "gain", "first gradient",
         "fresh residual", "trained residual", f"loss, {sizes.longer}× steps"], rows,
        f"*Operations* and *seconds* of a step over the baseline's; *gain* over the tuned baseline in nats, of "
        f"medians; *first gradient*: norm of the loss's gradient at the first layer before training. "
        f"The baseline with {EXTRA:g} times the compute: {more or 'not trained'}.",
    )  # fmt: skip


def _relations(results: PayResults) -> PageTable:
    """Rank correlations of residual and loss, by setting, width and length of training."""
    rows = []
    for setting in SETTINGS:
        for arm in (REPORTED, LONGER):
            for width in results.widths(arm):
                found = [results.relation(setting, width, when, arm) for when in ("trained", "fresh", "gradient")]
                cells = ["not told" if one is None else one.text for one in found]
                rows.append([setting, str(width), "longer" if arm == LONGER else "usual", *cells])
    return PageTable(
        "Rank correlation of residual and held-out loss across the baseline and remedies",
        ["setting", "width", "training", "residual after training", "residual before training",
         "first layer's gradient before training"], rows,
        "In brackets 90% of the draws of seeds; p: the share of all orders of networks with as large a correlation, of "
        "either sign. Negative: less collapse, or a larger gradient, goes with a lower loss; where both do, a shortcut "
        "to the first layer explains as much. *Not told*: nothing learns, or too few networks.",
    )  # fmt: skip


def _rates(results: PayResults) -> PageTable:
    """What tuning is worth: the baseline and the best remedy at the middle rate of the grid and at their own."""
    tuning, rows = results.tables["tuning"], []
    middle = sorted(results.sizes.rates)[len(results.sizes.rates) // 2]
    for setting, width in product(SETTINGS, results.sizes.widths):
        at: dict[str, list[float]] = {}
        for remedy in results.sizes.conditions(setting):
            mine = tuning.filter(setting=setting, width=width, remedy=remedy)
            own = best_rate(tuning, setting, width, remedy)
            at[remedy] = [float(mine.filter(rate=rate)["loss"].median()) for rate in (middle, own)]  # type: ignore[arg-type]
        bests = [min(results.sizes.conditions(setting)[1:], key=lambda name, k=k: at[name][k]) for k in (0, 1)]
        cells = [f"{at[NONE][k]:.3f} | {bests[k]} {at[bests[k]][k]:.3f} | {at[NONE][k] - at[bests[k]][k]:+.3f}"
                 for k in (0, 1)]  # fmt: skip
        rows.append([setting, str(width), *(part for cell in cells for part in cell.split(" | "))])
    return PageTable(
        f"Is it the remedy or the rate? Medians of tuning seeds at {middle:g} for all, and at each network's own rate",
        ["setting", "width", "baseline, one rate", "best remedy, one rate", "gain, one rate", "baseline, own rate",
         "best remedy, own rate", "gain, own rates"], rows,
        "Own rates were chosen on these seeds: losses of other seeds are in the tables above.",
    )  # fmt: skip


# ---- The figure


def draw(tables: Tables, sizes: PaySizes) -> "dict[str, Figure]":
    """Loss against residual in each setting, and what each remedy gains over the tuned baseline."""
    from rankscope.figures.matplotlib import palette, panels

    results = PayResults(tables, sizes)
    figure, axes = panels(2, width=5.2, height=3.4, rows=2)
    for panel, setting in zip(axes, SETTINGS, strict=False):
        for number, remedy in enumerate(sizes.conditions("pre")):
            colour = "black" if remedy == NONE else palette()[(number - 1) % len(palette())]
            for place, width in enumerate(sizes.widths):
                cell = results.cell(setting, width, remedy)
                if cell is None:
                    continue
                both = [(a, b) for a, b in zip(cell.residuals, cell.losses, strict=True) if a is not None]
                if both:
                    label = ("no remedy" if remedy == NONE else remedy) if place == 0 else None
                    panel.plot(*zip(*both, strict=True), linestyle="none", marker=MARKS[place % len(MARKS)],
                               markersize=5, color=colour, markerfacecolor=colour if place == 0 else "none",
                               label=label)  # fmt: skip
        panel.axhline(results.blind, color="grey", linewidth=0.9, linestyle="--")
        panel.set_title(f"{LABELS[setting][0].upper()}{LABELS[setting][1:]}", loc="left", fontsize=9)
        panel.set_xlabel("log10 of the relative residual after training")
        panel.set_ylabel("held-out loss, nats")
    _gain_panel(axes[3], results)
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=8)
    return {QUESTION.name: figure}


MARKS = ("o", "s", "^", "D")
GAINS = (-1, -0.1, -0.05, 0, 0.05, 0.1, 1)  # Ticks, in nats


def _gain_panel(axes: "Axes", results: PayResults) -> None:
    """Median and range of gains over the tuned baseline, by remedy: settings apart by colour and height."""
    colours = dict(zip(SETTINGS, ("#4c72b0", "#dd8452", "#55a868"), strict=True))
    names = results.sizes.remedies
    for row, remedy in enumerate(names):
        for k, setting in enumerate(SETTINGS):
            for arm, shift in ((REPORTED, 0.0), (LONGER, 0.11)):
                gains = results.gains(setting, remedy, arm)
                if not gains:
                    continue
                y = row + 0.27 * (k - 1) + shift
                label = LABELS[setting] if row == 0 and arm == REPORTED else None
                axes.plot([min(gains), max(gains)], [y, y], color=colours[setting], linewidth=1.2)
                axes.plot([statistics.median(gains)], [y], linestyle="none", marker="o" if arm == REPORTED else "D",
                          markersize=4, color=colours[setting], label=label,
                          markerfacecolor=colours[setting] if arm == REPORTED else "white")  # fmt: skip
    axes.axvline(0, color="grey", linewidth=0.9)
    axes.set_xscale("symlog", linthresh=0.1)
    axes.set_xticks(GAINS, [f"{gain:g}" for gain in GAINS])
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_title("Gain over the tuned baseline, equal compute", loc="left", fontsize=9)
    axes.set_xlabel("nats")
    axes.legend(fontsize=7, frameon=False, loc="best")


QUESTION = Question(
    name="does-it-pay",
    title="Does preventing collapse pay, at equal compute and with a tuned learning rate for each?",
    why=(
        "Remedies against collapse are published with one recipe, and our own table of 19 of them has one rate for "
        "all. Whether a network that keeps its tokens apart also learns better, once the baseline has its own rate and "
        "as much compute, was not asked. It decides whether collapse is a disease or a symptom."
    ),
    hypotheses=(
        "Tuning alone does not help: post-norm and without skips, the baseline learns nothing at any rate of the grid, "
        "at either width.",
        "Post-norm and without skips, some remedy beats the tuned baseline at equal compute and at both widths, also "
        f"where the baseline has {EXTRA:g} times the compute.",
        "Pre-norm, where nothing collapses, no remedy beats the tuned baseline at both widths.",
        "Post-norm and without skips, a larger residual after training goes with a lower loss across remedies (rank "
        f"correlation of at most -{RELATED:g}, p of at most {CHANCE:g}, at both widths).",
        "The same holds of the residual before training, which cannot be a result of learning.",
        "Pre-norm, it does not hold of the residual after training, at either width.",
        "Longer training changes none of this: remedies beat the baseline in the same settings.",
    ),
    method=(
        "Decoders learn the next character of Moby Dick, from Xavier weights by AdamW with a warm-up of a tenth of "
        "the steps and a cosine, in three settings: norms before branches (`pre`), norms after skips (`post`), and no "
        "skips. Remedies were chosen by the table of remedies: those that held collapse off most (NeuTRENO, value "
        "residual, 1/√L), those that learnt best in `pre` (gates, differential attention's second version), and those "
        "that cost most (ContraNorm, differential attention). That favours remedies; networks of that table (width "
        "128, seeds 0 to 2) are none of those reported here. 1/√L, a weight of skips, is left out where there are "
        "none.\n\nNeuTRENO and value residual take the first layer's values to every later layer, which without skips "
        "is a shortcut where there was none: they may help by the gradient that comes back on it, and not by tokens "
        "that stay apart. The first layer's gradient before training is the control: where it orders networks as well "
        "as the residual, the two explanations are not told apart.\n\nEqual compute: steps are divided by a remedy's "
        "operations over the baseline's, matrix products forward and backward as torch counts them. That was fixed "
        "beforehand, because seconds of networks this small are those of starting kernels and differ between machines. "
        "A second baseline trains for 1.5 times the steps: beating it cannot be explained by costs FLOPs do not count, "
        "unless a step takes more than 1.5 times as long. Every network is tuned on "
        "the same grid of rates and the same tuning seeds, and reported on others; the remedy that the answer names is "
        "the best on tuning seeds. The relative residual after the "
        "last layer is measured in deviation arithmetic. Rank correlations are of medians over seeds, across the "
        "baseline and all remedies of a setting, with p by enumeration of all orders and an interval by drawing seeds."
    ),
    refuted_by=(
        "Larger models, other data, or thousands of times the steps; a warm-up or initial weights tuned for the "
        "baseline as well (a post-norm network may learn with a longer warm-up); remedies that were not tried; numbers "
        "of a remedy's own (its strength) tuned beside the rate."
    ),
    quick=QUICK, full=FULL, gather=gather, answer=answer, draw=draw, seconds=450.0,
    caption="Every seed; circles: the smaller width, squares: the larger. Dashed: a guess by frequency. Gains: median "
    "and range over seeds and widths; diamonds: longer training.",
)  # fmt: skip

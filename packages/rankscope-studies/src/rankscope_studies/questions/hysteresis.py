"""Hysteresis: a trained network loses its skips, collapses, and gets them back. When does it recover?

Hofmann & Mäder (2026) ramp the weight of skips down during training. Tokens collapse at a weight of 0.02 to 0.03; when
the weight is ramped up again, the network recovers only at twelve times that, or not at all. They have no public code,
and draw numbers below 1e-13 as zero.

Here the same, every few steps of the training read in deviation arithmetic, so that no number is too small. Collapse is
told by two measures, each by itself (`MEASURES`): the gradient of queries and keys, its median over layers, below 1e-6;
and the relative residual of tokens after the last layer, below 0.01. Beside them stands the loss: whether a network
does better than a guess, when it has lost its skips and when it has them again.

A network that is slow to change recovers late on the way up and collapses late on the way down, whatever its weights
remember. Each network is therefore trained along two ramps, one twice as long as the other: a lag of so many steps
makes half the distance between the logs of the two weights on the longer ramp, hysteresis in the weight the same.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np
import polars as pl

from rankscope.figures import Axes, Figure, palette, panels
from rankscope.forecasts import Plan, by_layer
from rankscope.lab import Initialisation, NextCharacter, Recipe
from rankscope_studies.questions.question import LATER, HypothesisVerdict, Question, RuleChange, StudyAnswer, Tables
from rankscope_studies.questions.summaries import spread
from rankscope_studies.study import PageTable, Setup

LOWEST = 0.005  # The least weight of skips: a quarter of the least at which networks are said to collapse
PUBLISHED_WEIGHTS = (0.02, 0.03)  # Of skips, at collapse
PUBLISHED_RATIO = 12.0  # The weight at recovery over that at collapse, at least
SAME_LAG = 0.75  # ln(recovery / collapse) on the longer ramp over that on the shorter: 1 in the weight, 1/2 in time
COLLAPSED = -6.0  # log10 of the gradient of queries and keys below which a network is collapsed
EQUAL = -2.0  # log10 of the relative residual of tokens below which tokens have collapsed
MEASURES = {"gradient": COLLAPSED, "residual": EQUAL}
"""Columns of a trajectory that tell collapse, and the log10 below which each does."""
TOLD_BY = ("residual", "gradient", "loss")  # Columns of a trajectory that turn, in the order of the page
LEARNT = 0.1  # Nats below a guess by frequency, from which on a network has learnt
PHASES = ("before", "down", "bottom", "up", "after")


@dataclass(frozen=True)
class ConstantRate(Recipe):
    """A training whose learning rate rises and then stays."""

    def lr_scale(self, step: int) -> float:
        """The share of the learning rate at a step."""
        return min(1.0, (step + 1) / max(1, round(self.warmup * self.steps)))


@dataclass(frozen=True)
class SkipSchedule:
    """The weight of skips at each step of one training."""

    settle: int  # Steps at weight 1, before and after
    ramp: int  # Steps of each ramp

    @property
    def steps(self) -> int:
        """How many steps the training has, all phases together."""
        return 2 * self.settle + 2 * self.ramp + self.bottom

    @property
    def bottom(self) -> int:
        """Steps at the least weight."""
        return self.ramp // 4

    def weight(self, step: int) -> tuple[str, float]:
        """(phase, weight of skips) at a step, from 0.

        >>> schedule = SkipSchedule(settle=10, ramp=20)
        >>> [schedule.weight(step)[0] for step in (0, 12, 31, 40, 60)]
        ['before', 'down', 'bottom', 'up', 'after']
        """
        ends = np.cumsum([self.settle, self.ramp, self.bottom, self.ramp])
        phase = PHASES[int(np.searchsorted(ends, step, side="right"))]
        if phase == "down":
            return phase, LOWEST ** ((step - ends[0] + 1) / self.ramp)
        if phase == "up":
            return phase, LOWEST ** (1 - (step - ends[2] + 1) / self.ramp)
        return phase, LOWEST if phase == "bottom" else 1.0


@dataclass(frozen=True)
class Sizes:
    """How large the experiment is."""

    depths: tuple[int, ...]
    width: int
    context: int
    batch: int
    lr: float
    seeds: int
    settle: int  # Steps at weight 1, before and after; read four times in each
    ramps: tuple[int, int]  # Steps of each ramp; the second is twice the first
    readings: int  # Of each ramp

    @property
    def factor(self) -> float:
        """By which the weight of skips changes from one reading to the next."""
        return float(LOWEST ** (-1 / self.readings))


QUICK = Sizes(
    depths=(12,), width=32, context=32, batch=8, lr=3e-3, seeds=2, settle=160, ramps=(60, 120), readings=12
)  # fmt: skip
FULL = Sizes(
    depths=(12, 24), width=128, context=64, batch=16, lr=1e-3, seeds=3, settle=400, ramps=(400, 800), readings=20
)  # fmt: skip


def trajectory(
    layers: int, seed: int, ramp: int, sizes: Sizes, device: str = "cpu"
) -> Iterator[dict[str, float | str]]:
    """Train one network along the schedule, and yield what is read every few steps.

    Args:
        layers: The depth of the network.
        seed: What weights and samples are drawn from.
        ramp: Steps in which skips fall, and in which they rise.
        sizes: Width, steps and how often is read.
        device: Where it is trained; readings are taken on the CPU.

    Yields:
        layers · seed · ramp · step · phase · weight · loss (the mean of as many steps as are between readings of a
        ramp) · blind · residual · gradient (both log10; the gradient of queries and keys, the median over layers). The
        last row of a network that diverges has a loss that is not finite, and NaN in the last two.
    """
    task, schedule, every = NextCharacter(sizes.context), SkipSchedule(sizes.settle, ramp), ramp // sizes.readings
    arch = task.architecture(layers, sizes.width, 4)
    recipe = ConstantRate(steps=schedule.steps, batch_size=sizes.batch, lr=sizes.lr, seed=seed)
    plan = Plan(arch, task, recipe, Initialisation("xavier"))
    training = plan.training(device, capture=False)  # recorded steps would keep the weight of skips
    model, blind = training.models[0], task.blind
    for step in training:
        phase, weight = schedule.weight(step - 1)
        if step % (sizes.settle // 4 if phase in ("before", "after") else every) == 0:
            recent = [float(loss) for loss in training.losses[-every:]]
            row: dict[str, float | str] = {
                "layers": layers, "seed": seed, "ramp": ramp, "step": step, "phase": phase, "weight": weight,
                "loss": sum(recent) / len(recent), "blind": blind, "residual": math.nan, "gradient": math.nan,
            }  # fmt: skip
            if not math.isfinite(sum(recent)):
                yield row
                return
            on_cpu = copy.deepcopy(model).to("cpu")
            table, _, _ = by_layer(on_cpu, replace(plan, arch=model.net.arch), theory=False)
            gradients = np.array([table[kind].to_numpy()[1:] for kind in ("query", "key")])
            yield row | {"residual": table["residual"][-1], "gradient": float(np.nanmedian(gradients))}
        if step < schedule.steps:
            _, following = schedule.weight(step)
            model.net.arch = model.net.arch.replace(attention_skip=following, mlp_skip=following)


class TurningPoints(NamedTuple):
    """The weights of skips at which a network collapses and recovers; NaN where that does not happen."""

    collapse: float = math.nan
    recovery: float = math.nan
    held_low: bool = False  # Collapse was read while the weight was held at its lowest, and not on the ramp
    held_high: bool = False  # Recovery was read while the weight was held at 1, after the ramp


def is_lost(table: pl.DataFrame, measure: str) -> list[bool | None]:
    """Whether each reading of a network is that of a collapsed one; None where rounding may have decided it.

    Args:
        table: Rows of `trajectory`.
        measure: A column in `TOLD_BY`. Loss is lost where it is not below a guess by frequency by `LEARNT` nats.
    """
    if measure == "loss":
        return (table["loss"] >= table["blind"] - LEARNT).to_list()
    return [None if math.isnan(value) else value < MEASURES[measure] for value in table[measure]]


def turning_points(table: pl.DataFrame, measure: str = "gradient") -> TurningPoints:
    """Where one trajectory collapses and recovers.

    Collapse is the first reading on the way down from which on all readings, down and at the bottom, are beyond the
    threshold of the measure; recovery the first one on the way up from which on none is, to the end. So one reading
    that dips is neither. A reading that rounding may have decided (NaN) counts as those beside it where they agree,
    and as neither below nor above where they do not.

    Args:
        table: Rows of `trajectory`, of one network.
        measure: A column in `TOLD_BY`.
    """
    falling, rising = (table.filter(pl.col("phase").is_in(part)).sort("step") for part in (PHASES[1:3], PHASES[3:]))
    low = _from_there_on(is_lost(falling, measure))
    if low == falling.height:
        return TurningPoints()
    high = _from_there_on([None if lost is None else not lost for lost in is_lost(rising, measure)])
    collapse, held_low = float(falling["weight"][low]), falling["phase"][low] == "bottom"
    if high == rising.height:
        return TurningPoints(collapse, held_low=held_low)
    return TurningPoints(collapse, float(rising["weight"][high]), held_low, rising["phase"][high] == "after")


def _from_there_on(outcomes: list[bool | None]) -> int:
    """The index of the first outcome that is true with all that follow it; their number where the last is not.

    An outcome that is not told (None) is true between two that are.

    >>> _from_there_on([True, False, True, None, True]), _from_there_on([True, False])
    (2, 2)
    >>> _from_there_on([False, None, True])
    2
    """
    return 1 + max((k for k in range(len(outcomes)) if not _holds(outcomes, k)), default=-1)


def _holds(outcomes: list[bool | None], k: int) -> bool:
    """Whether an outcome is true, or, where it is not told, the nearest told ones on both sides are."""
    before = next((outcome for outcome in reversed(outcomes[: k + 1]) if outcome is not None), False)
    after = next((outcome for outcome in outcomes[k:] if outcome is not None), False)
    return before and after


def gather(setup: Setup, sizes: Sizes) -> dict[str, pl.DataFrame]:
    """Train every network along the schedule: one cached piece each."""
    parts = {
        f"{layers} layers, seed {seed}, ramp {ramp}": lambda layers=layers, seed=seed, ramp=ramp: pl.DataFrame(
            list(trajectory(layers, seed, ramp, sizes, setup.device))
        )
        for layers, seed, ramp in product(sizes.depths, range(sizes.seeds), sizes.ramps)
    }
    return {"trajectories": setup.cached_parts(parts, sizes=repr(sizes), lowest=LOWEST)}


# ---- The answer, from tables alone

KEYS = ["layers", "seed", "ramp"]


def has_learnt(table: pl.DataFrame) -> bool:
    """Whether the loss of a network is clearly below a guess by frequency when its skips begin to fall.

    Args:
        table: Rows of `trajectory`, of one network.
    """
    last = table.filter(phase="before").sort("step").tail(1)
    return bool((last["loss"] < last["blind"] - LEARNT).any())


def points_of(table: pl.DataFrame) -> pl.DataFrame:
    """A row for each network and measure: layers · seed · ramp · measure · `TurningPoints` · ratio of the two weights
    (NaN where the network does not collapse, or does not recover) · open (whether the ends of the ramp decided that
    ratio: collapse only while the weight was held at its lowest, or recovery only at weight 1). Networks that diverged,
    and those that had not learnt before their skips fell, are left out: what has learnt nothing can neither lose nor
    regain it.

    Args:
        table: Rows of `trajectory`, of all networks.
    """
    rows = [
        (*names, measure, *turning_points(part, measure))
        for names, part in table.group_by(KEYS, maintain_order=True)
        if part["loss"].is_finite().all() and has_learnt(part)
        for measure in TOLD_BY
    ]
    kinds = {**dict.fromkeys(KEYS, pl.Int64), "measure": pl.String, "collapse": pl.Float64, "recovery": pl.Float64,
             "held_low": pl.Boolean, "held_high": pl.Boolean}  # fmt: skip
    points = pl.DataFrame(rows, schema=kinds, orient="row")
    return points.with_columns(
        ratio=pl.col("recovery") / pl.col("collapse"), open=pl.col("held_low") | (pl.col("recovery") >= 1.0)
    )


def answer(tables: Tables, sizes: Sizes) -> StudyAnswer:
    """The answer that the trajectories give."""
    table = tables["trajectories"]
    points = points_of(table)
    diverged = table.filter(~pl.col("loss").is_finite()).select(KEYS).unique().height
    learnt = sum(has_learnt(part) for _, part in table.group_by(KEYS))
    notes = [
        f"{sizes.seeds} seeds, width {sizes.width}, batches of {sizes.batch}, AdamW at a constant {sizes.lr:g}; skips "
        f"stay 1 for {sizes.settle} steps, fall to {LOWEST:g} in {sizes.ramps[0]} or {sizes.ramps[1]} steps, stay "
        f"there for a quarter of that, rise again, and stay 1 for {sizes.settle} steps. {diverged or 'No'} networks "
        f"diverged{' and are left out' if diverged else ''}; {learnt} of {table.select(KEYS).unique().height} had "
        f"learnt (by {LEARNT:g} nats from guessing) when skips began to fall, and are judged. A seed on each of two "
        "ramps counts as two networks. No network was trained as long with all its skips: what the way through "
        "collapse costs at the end is not known.",
        "Changed after a review of the rules, before the run of this page: skips fell to 0.02 only, which is where "
        "collapse had been published, so the end of the ramp decided; one dip below the threshold was taken for "
        "collapse, one reading above it for recovery; the first hypothesis was judged without its weights; only "
        "gradients were judged; there was one ramp, on which a lag in time cannot be told from hysteresis. Three "
        "networks had been trained by the earlier rules at full size; of their numbers only the loss before the ramp "
        "was looked at.",
        "Changed after a quick run with 40 steps before the ramp, in which no network had learnt anything before its "
        "skips fell (all collapsed at weights of 0.41 to 0.64, and were back at weight 1): networks learn longer, and "
        f"only those are judged that have learnt by {LEARNT:g} nats.",
        "Changed after a full run was seen: a reading of tokens that rounding may have decided "
        f"({table['residual'].is_nan().sum()} of {table.height}) counts as the readings beside it where those agree "
        "(before, it was not below the threshold, and put one collapse at the end of the ramp); loss is read beside "
        "tokens and gradients, and 'yes' asks that it recovers too; depths are reported apart; a ratio that the ends "
        "of the ramp decided (collapse while the weight was held at its lowest, recovery at 1 alone) neither refutes "
        "the published one nor tells a lag. By the readings that rounding may have decided one verdict changed: the "
        "fifth did not hold before.",
    ]
    gradient, residual = (points.filter(measure=measure) for measure in ("gradient", "residual"))
    verdicts = [
        _collapse_verdict(gradient, sizes), _ratio_verdict(gradient, sizes), _collapse_verdict(residual, sizes),
        _ratio_verdict(residual, sizes), _lag_verdict(points.filter(pl.col("measure") != "loss"), sizes),
    ]  # fmt: skip
    return StudyAnswer(_sentence(points), verdicts, [_evidence(table, points, sizes)], notes)


def _evidence(table: pl.DataFrame, points: pl.DataFrame, sizes: Sizes) -> PageTable:
    """A row for each network: where it turns by each measure, and its loss before, between and after."""
    rows = []
    for names, of_network in points.sort(KEYS, maintain_order=True).group_by(KEYS, maintain_order=True):
        part = table.filter(**dict(zip(KEYS, names, strict=True))).sort("step")
        turns = [
            _turn(part, measure, TurningPoints(*of_network.filter(measure=measure).row(0)[4:8])) for measure in TOLD_BY
        ]
        losses = [part.filter(phase=phase)["loss"].to_list() for phase in ("before", "bottom", "after")]
        layers, seed, ramp = map(str, names)
        rows.append([layers, ramp, seed, *turns, *(f"{loss[-1]:.2f}" if loss else "–" for loss in losses)])
    return PageTable(
        "Weight of skips at which each network collapses → recovers (and the second over the first)",
        ["layers", "steps of a ramp", "seed", "tokens", "gradients of queries and keys", "loss", "loss before",
         "loss at the lowest weight", "loss at the end"], rows,
        f"Collapse: first reading on the way down from which on all are below {10**EQUAL:g} (tokens) or "
        f"1e{COLLAPSED:g} (gradients), or within {LEARNT:g} nats of a guess (loss). Recovery: first on the way up from "
        "which on none is. †: read only after the ramp had ended, while the weight was held at its lowest or at 1: on "
        "a ramp that went further the weight may be another. –: no collapse; *only rising*: none while skips fell, but "
        "some readings while they rose are beyond the threshold. The weight changes by "
        f"×{sizes.factor:.2f} between readings: networks cross the threshold up to that much above the weight of "
        "collapse, and up to that much below the weight of recovery. Losses are means of the training steps "
        "between two readings of a ramp.",
    )  # fmt: skip


def _turn(table: pl.DataFrame, measure: str, points: TurningPoints) -> str:
    """Where one network turns by one measure, as text."""
    if math.isnan(points.collapse):
        rising = table.filter(pl.col("phase").is_in(PHASES[3:]))
        return "only rising" if True in is_lost(rising, measure) else "–"
    collapse = f"{points.collapse:.3f}{'†' * points.held_low}"
    if math.isnan(points.recovery):
        return f"{collapse} → –"
    return f"{collapse} → {points.recovery:.3f}{'†' * points.held_high} ({points.recovery / points.collapse:.1f})"


def _together(outcomes: list[bool | None]) -> bool | None:
    """False where one outcome is, True where all are, None otherwise."""
    return False if False in outcomes else None if None in outcomes or not outcomes else True


def _by_depth(points: pl.DataFrame, text: Callable[[pl.DataFrame], str]) -> str:
    """Texts of the networks of each depth, beside each other."""
    parts = points.group_by("layers", maintain_order=True)
    return "; ".join(f"{layers} layers: {text(of_depth)}" for (layers,), of_depth in parts)


def _collapses(points: pl.DataFrame) -> str:
    """How many networks collapse, and at which weights."""
    weights, held = points["collapse"].drop_nans().to_list(), points["held_low"].sum()
    return (
        f"{len(weights) or 'none'} of {points.height} collapse"
        + f", at a weight of {spread(weights)}" * bool(weights)
        + f" ({held} of them only while it was held there)" * bool(held)
    )


def _recoveries(collapsed: pl.DataFrame) -> str:
    """How many of the networks that collapsed recover, and at how many times the weight of their collapse."""
    ratios = collapsed["ratio"].drop_nans().to_list()
    return f"{len(ratios) or 'none'} of {collapsed.height} recover" + (
        f", at {spread(ratios, '.1f')} times the weight of collapse" if ratios else ""
    )


def _collapse_verdict(points: pl.DataFrame, sizes: Sizes) -> HypothesisVerdict:
    """Whether every network collapses on the way down, between readings that do not exclude the published weights."""
    if not points.height:
        return HypothesisVerdict("no network had learnt", None)
    least, most = PUBLISHED_WEIGHTS
    weights = points["collapse"].drop_nans().to_list()
    count = sum(weight <= most and weight * sizes.factor >= least for weight in weights)
    ours = f"{_by_depth(points, _collapses)}; {count} of {points.height} at {least:g} to {most:g}, within a reading"
    return HypothesisVerdict(ours, count == points.height)


def _ratio_verdict(points: pl.DataFrame, sizes: Sizes) -> HypothesisVerdict:
    """Whether no network that collapsed recovers below twelve times the weight of its collapse.

    Both weights are known to one reading: the ratio of the crossings is between the ratio that was read, and that over
    the square of the factor. A network that is back only at weight 1 has not shown how much more it would have needed,
    and one that collapsed only while the weight was held at its lowest, how far down it would have gone.
    """
    collapsed = points.filter(pl.col("collapse").is_not_nan())
    if not collapsed.height:
        return HypothesisVerdict("no network collapses", None)
    outcomes: list[bool | None] = []
    for ratio, is_open in collapsed.select("ratio", "open").iter_rows():
        if math.isnan(ratio) or ratio / sizes.factor**2 >= PUBLISHED_RATIO:
            outcomes.append(True)
        else:
            outcomes.append(None if ratio >= PUBLISHED_RATIO or is_open else False)
    ours = f"{_by_depth(collapsed, _recoveries)}; an end of the ramp decided {collapsed['open'].sum()} of these ratios"
    return HypothesisVerdict(ours, _together(outcomes))


def _lag_verdict(points: pl.DataFrame, sizes: Sizes) -> HypothesisVerdict:
    """Whether the lag between collapse and recovery is of the weight (the same on both ramps), and not of time."""
    short, long = (points.filter(ramp=ramp).drop("ramp") for ramp in sizes.ramps)
    pairs = short.join(long, on=["layers", "seed", "measure"], suffix="_long", maintain_order="left")
    pairs = pairs.filter(pl.col("ratio").is_not_nan() & pl.col("ratio_long").is_not_nan())
    if not pairs.height:
        return HypothesisVerdict("no network collapses and recovers on both ramps", None)
    unsure = 2 * math.log(sizes.factor)
    outcomes: list[bool | None] = []
    logs = [(math.log(brief), math.log(lasting)) for brief, lasting in pairs.select("ratio", "ratio_long").iter_rows()]
    ends = pairs.select(pl.col("open") | pl.col("open_long")).to_series()
    for (short_lag, long_lag), is_open in zip(logs, ends, strict=True):
        if is_open or short_lag <= unsure + 1e-9:
            outcomes.append(None)  # the ramp's ends decided, or there is no lag that readings could tell
        elif long_lag - unsure >= SAME_LAG * short_lag:
            outcomes.append(True)
        else:
            outcomes.append(False if long_lag < SAME_LAG * (short_lag - unsure) else None)

    def ratios(of_depth: pl.DataFrame) -> str:
        return " and ".join(spread(of_depth[name].to_list(), ".1f") for name in ("ratio", "ratio_long"))

    def counts(of_depth: pl.DataFrame) -> str:
        return " and ".join(str(of_depth.filter(ramp=ramp)["collapse"].is_not_nan().sum()) for ramp in sizes.ramps)

    ours = (
        f"of {pairs.height} pairs the lag is as large or larger on the longer ramp in {outcomes.count(True)}, smaller "
        f"in {outcomes.count(False)}, and cannot be told in {outcomes.count(None)}; on ramps of {sizes.ramps[0]} and "
        f"{sizes.ramps[1]} steps recovery over collapse is {_by_depth(pairs, ratios)}; by tokens so many networks "
        f"collapse: {_by_depth(points.filter(measure='residual'), counts)}"
    )
    return HypothesisVerdict(ours, _together(outcomes))


def _sentence(points: pl.DataFrame) -> str:
    """The answer: by tokens and by loss, depth by depth."""
    if not points.height:
        return "Cannot be told: no network had learnt when its skips began to fall."
    lost = points.filter((pl.col("measure") != "gradient") & pl.col("collapse").is_not_nan())
    if not lost.height:
        return f"No network collapses, and none forgets what it learnt, while skips fall to {LOWEST:g}."
    recovered = lost["recovery"].is_not_nan()
    lead = "Yes, in tokens and loss" if recovered.all() else "Some do" if recovered.any() else "No"
    parts: list[str] = []
    for layers in sorted(points["layers"].unique(), reverse=True):  # what collapses most comes first
        tokens, loss = (points.filter(layers=layers, measure=measure) for measure in ("residual", "loss"))
        weights = tokens["collapse"].drop_nans().to_list()
        text = f"{layers} layers: {len(weights) or 'none'} of {tokens.height} collapse{' by tokens' * (not parts)}"
        if weights:
            back = _back(tokens, "ratio", "recover", "at {} times that", ".1f")
            at = "at the lowest weight," if {*weights} == {LOWEST} else "at weight"
            text += f", {at} {spread(weights, '.2g')}, {back}"
        if forgotten := loss["collapse"].is_not_nan().sum():
            text += f"; {forgotten} forget, {_back(loss, 'recovery', 'learn again', 'at weight {}', '.2g')}"
        parts.append(text)
    return f"{lead}. {'. '.join(parts)}."


def _back(points: pl.DataFrame, column: str, verb: str, where: str, form: str) -> str:
    """How many of the networks that collapsed are back, and where."""
    values, collapsed = points[column].drop_nans().to_list(), points["collapse"].is_not_nan().sum()
    many = "all" if len(values) == collapsed else len(values) or "none"
    return f"{many} {verb}" + f", {where.format(spread(values, form))}" * bool(values)


# ---- The figure

TICKS = (0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
PANELS = {
    "loss": "Loss (grey: guessing)", "residual": "log10 of the residual of tokens",
    "gradient": "log10 of the gradient of queries and keys",
}  # fmt: skip


def draw(tables: Tables, sizes: Sizes) -> dict[str, Figure]:
    """Loss, residual and gradient against the weight of skips, on the way down and up: a row for each ramp."""
    table = tables["trajectories"]
    figure, axes = panels(len(PANELS), width=4.4, height=3.6, rows=len(sizes.ramps))
    for index, (ramp, (name, title)) in enumerate(product(sizes.ramps, PANELS.items())):
        _draw_ways(axes[index], table.filter(ramp=ramp), name)
        axes[index].set_title(f"{title}; ramps of {ramp} steps", fontsize=9, loc="left")
    axes[0].legend(fontsize=8, frameon=False, loc="lower left")
    return {QUESTION.name: figure}


def _draw_ways(axes: Axes, table: pl.DataFrame, name: str) -> None:
    """One panel: a column of the table against the weight of skips; marks point to where the weight goes."""
    ways = {"down": (PHASES[:3], "-", "<"), "up": (PHASES[2:], "--", ">")}
    axes.axvspan(*PUBLISHED_WEIGHTS, color="grey", alpha=0.2, linewidth=0)
    blind = float(table["blind"][0]) if table.height else math.nan
    axes.axhline(MEASURES.get(name, blind - LEARNT), color="grey", linewidth=0.9, linestyle=":")
    if name not in MEASURES:
        axes.axhline(blind, color="grey", linewidth=0.9)
    for k, ((layers,), of_depth) in enumerate(table.group_by(["layers"], maintain_order=True)):
        for (seed,), of_seed in of_depth.group_by(["seed"], maintain_order=True):
            for n, (way, (phases, dash, mark)) in enumerate(ways.items()):
                part = of_seed.filter(pl.col("phase").is_in(phases)).sort("step")
                part = part[max(part.filter(phase="before").height - 1, 0) :]  # from where skips begin to fall
                label = f"{layers} layers, {way}" if seed == 0 else None
                axes.plot(part["weight"], part[name], dash, color=palette()[2 * k + n], label=label, linewidth=1.2,
                          marker=mark, markersize=3.5)  # fmt: skip
    axes.set_xscale("log")
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.minorticks_off()
    axes.set_xlabel("weight of skips: falls (◂), then rises (▸)")


REVIEWED = f"{LATER} a review of the first rules: "
QUESTION = Question(
    name="hysteresis",
    title="Does a network that lost its skips recover when it gets them back?",
    why=(
        "Hofmann & Mäder (2026) ramp the weight of skips down during training. Tokens collapse at a weight of 0.02 to "
        "0.03; when the weight is ramped up again, the network recovers only at twelve times that, or not at all. They "
        "have no public code, and draw numbers below 1e-13 as zero."
    ),
    hypotheses=(
        "Every network collapses on the way down, at a weight of skips of 0.02 to 0.03.",
        "Networks recover at 12 times the weight of their collapse and more, or not at all.",
        f"{REVIEWED}every network also collapses at these weights by its tokens (relative residual below "
        f"{10**EQUAL:g}).",
        f"{REVIEWED}also by their tokens, networks recover at 12 times the weight of their collapse and more, or not "
        "at all.",
        f"{REVIEWED}the lag is of the weight, not of time: on a ramp twice as long, ln(recovery / collapse) is at "
        f"least {SAME_LAG:g} of what it is on the shorter one.",
    ),
    method=(
        "A decoder with norms before its branches learns the next character at a constant rate. Its skips have weight "
        f"1, then fall geometrically to {LOWEST:g}, stay there, and rise again; each network is trained along two "
        "ramps, the second twice as long. Networks that have learnt nothing by then are not judged. "
        "Every few steps the relative residual of tokens after the last layer and the "
        "gradients of queries and keys (the median over layers) are read in deviation arithmetic. A network counts as "
        f"collapsed where that median is below 1e{COLLAPSED:g}; by tokens, where the residual is below {10**EQUAL:g}. "
        f"It has forgotten where its loss is less than {LEARNT:g} nats below a guess by frequency. "
        "A lag of so many steps makes ln(recovery / collapse) half as large on a ramp twice as long; hysteresis in the "
        "weight leaves it as it is."
    ),
    refuted_by="Recovery at less than twice the weight of collapse in most seeds; another task, width, rate or ramp.",
    quick=QUICK, full=FULL, gather=gather, answer=answer, draw=draw, seconds=600.0,
    caption="Solid, pointing left: skips fall; dashed, pointing right: they rise again. One line for each seed. "
            "Dotted: beyond it a network has collapsed. Readings while the weight is held lie at 0.005 and at 1. Grey "
            "band: weights at which collapse was published.",
    changed=RuleChange(
        "A reading that rounding may have decided counts as those beside it, and a ratio that an end of the "
        "ramp decided tells nothing.",
        {5: False},
    ),
)  # fmt: skip

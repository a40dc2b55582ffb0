"""Hysteresis: a trained network loses its skips, collapses, and gets them back. When does it recover?

Hofmann & Mäder (2026) ramp the weight of skips down during training. Tokens collapse at a weight of 0.02 to 0.03; when
the weight is ramped up again, the network recovers only at twelve times that, or not at all. They have no public code,
and draw numbers below 1e-13 as zero.

Here the same, every few steps of the training read in deviation arithmetic, so that no number is too small. Collapse is
told by two measures, each by itself (`MEASURES`): the gradient of queries and keys, its median over layers, below 1e-6;
and the relative residual of tokens after the last layer, below 0.01.

A network that is slow to change recovers late on the way up and collapses late on the way down, whatever its weights
remember. Each network is therefore trained along two ramps, one twice as long as the other: a lag of so many steps
makes half the distance between the logs of the two weights on the longer ramp, hysteresis in the weight the same.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import polars as pl

from rankscope.figures.matplotlib import Axes, Figure, palette, panels
from rankscope.forecasts.layers import by_layer
from rankscope.forecasts.plan import Plan
from rankscope.lab import Initialisation, Recipe
from rankscope.lab.tasks import NextCharacter
from rankscope.studies.questions.question import LATER, HypothesisVerdict, Question, StudyAnswer, Tables
from rankscope.studies.questions.summaries import spread
from rankscope.studies.study import PageTable, Setup

LOWEST = 0.005  # The least weight of skips: a quarter of the least at which networks are said to collapse
PUBLISHED_WEIGHTS = (0.02, 0.03)  # Of skips, at collapse
PUBLISHED_RATIO = 12.0  # The weight at recovery over that at collapse, at least
SAME_LAG = 0.75  # ln(recovery / collapse) on the longer ramp over that on the shorter: 1 in the weight, 1/2 in time
COLLAPSED = -6.0  # log10 of the gradient of queries and keys below which a network is collapsed
EQUAL = -2.0  # log10 of the relative residual of tokens below which tokens have collapsed
MEASURES = {"gradient": COLLAPSED, "residual": EQUAL}
"""Columns of a trajectory that tell collapse, and the log10 below which each does."""
NAMES = {"gradient": "gradients of queries and keys", "residual": "tokens"}
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
    recipe = ConstantRate(steps=schedule.steps, batch=sizes.batch, lr=sizes.lr)
    plan = Plan(arch, task, recipe, Initialisation("xavier"), seed=seed)
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


def turning_points(table: pl.DataFrame, measure: str = "gradient") -> tuple[float, float]:
    """(The weight of skips at collapse, that at recovery) of one trajectory; NaN where that does not happen.

    Collapse is the first reading on the way down from which on all readings, down and at the bottom, are below the
    threshold of the measure; recovery the first one on the way up from which on none is, to the end. So one reading
    that dips is neither. A reading that rounding may have decided (NaN) counts as those beside it where they agree,
    and as neither below nor above where they do not.

    Args:
        table: Rows of `trajectory`, of one network.
        measure: A column in `MEASURES`.
    """
    parts = [table.filter(pl.col("phase").is_in(phases)).sort("step") for phases in (PHASES[1:3], PHASES[3:])]
    low, high = (
        [None if math.isnan(value) else (value < MEASURES[measure]) == wanted for value in part[measure]]
        for part, wanted in zip(parts, (True, False), strict=True)
    )
    collapse = _from_there_on(low, parts[0]["weight"].to_list())
    if math.isnan(collapse):
        return math.nan, math.nan
    return collapse, _from_there_on(high, parts[1]["weight"].to_list())


def _from_there_on(outcomes: list[bool | None], weights: list[float]) -> float:
    """The weight of the first outcome that is true with all that follow it; NaN where the last is not.

    An outcome that is not told (None) is true between two that are.

    >>> _from_there_on([True, False, True, None, True], [0.5, 0.4, 0.3, 0.2, 0.1])
    0.3
    >>> _from_there_on([True, False], [0.5, 0.4]), _from_there_on([False, None, True], [0.5, 0.4, 0.3])
    (nan, 0.3)
    """
    last_wrong = max((k for k in range(len(outcomes)) if not _holds(outcomes, k)), default=-1)
    return weights[last_wrong + 1] if last_wrong + 1 < len(outcomes) else math.nan


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
    """A row for each network and measure: layers · seed · ramp · measure · collapse · recovery · ratio of the two (NaN
    where the network does not collapse, or does not recover). Networks that diverged, and those that had not learnt
    before their skips fell, are left out: what has learnt nothing can neither lose nor regain it.

    Args:
        table: Rows of `trajectory`, of all networks.
    """
    rows = [
        (*names, measure, *turning_points(part, measure))
        for names, part in table.group_by(KEYS, maintain_order=True)
        if part["loss"].is_finite().all() and has_learnt(part)
        for measure in MEASURES
    ]
    kinds = {**dict.fromkeys(KEYS, pl.Int64), "measure": pl.String, "collapse": pl.Float64, "recovery": pl.Float64}
    points = pl.DataFrame(rows, schema=kinds, orient="row")
    return points.with_columns(ratio=pl.col("recovery") / pl.col("collapse"))


def answer(tables: Tables, sizes: Sizes) -> StudyAnswer:
    """The answer that the trajectories give."""
    table = tables["trajectories"]
    points = points_of(table)
    rows = [
        [str(layers), str(ramp), str(seed), NAMES[measure], _weight(collapse), _weight(recovery),
         "–" if math.isnan(ratio) else f"{ratio:.1f}"]
        for layers, seed, ramp, measure, collapse, recovery, ratio in points.sort(KEYS, maintain_order=True).iter_rows()
    ]  # fmt: skip
    evidence = PageTable(
        "Weight of skips at which each network collapses and recovers (–: it does not)",
        ["layers", "steps of a ramp", "seed", "told by", "collapse", "recovery", "recovery / collapse"], rows,
        f"Collapse: first reading on the way down from which on all are below 1e{COLLAPSED:g} (gradients) or "
        f"{10**EQUAL:g} (tokens). Recovery: first on the way up from which on none is. The weight changes by "
        f"×{sizes.factor:.2f} between readings: networks cross the threshold up to that much above the weight of "
        "collapse, and up to that much below the weight of recovery.",
    )  # fmt: skip
    diverged = table.filter(~pl.col("loss").is_finite()).select(KEYS).unique().height
    learnt = sum(has_learnt(part) for _, part in table.group_by(KEYS))
    notes = [
        f"{sizes.seeds} seeds, width {sizes.width}, batches of {sizes.batch}, AdamW at a constant {sizes.lr:g}; skips "
        f"stay 1 for {sizes.settle} steps, fall to {LOWEST:g} in {sizes.ramps[0]} or {sizes.ramps[1]} steps, stay "
        f"there for a quarter of that, rise again, and stay 1 for {sizes.settle} steps. {diverged or 'No'} networks "
        f"diverged{' and are left out' if diverged else ''}; {learnt} of {table.select(KEYS).unique().height} had "
        f"learnt (by {LEARNT:g} nats from guessing) when skips began to fall, and are judged.",
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
        f"({table['residual'].is_nan().sum()} of {table.height}) counts as the readings beside it where those agree. "
        "Before, it was not below the threshold, and put one collapse at the end of the ramp.",
    ]
    gradient, residual = (points.filter(measure=measure) for measure in ("gradient", "residual"))
    verdicts = [
        _collapse_verdict(gradient, sizes), _ratio_verdict(gradient, sizes), _collapse_verdict(residual, sizes),
        _ratio_verdict(residual, sizes), _lag_verdict(points, sizes),
    ]  # fmt: skip
    return StudyAnswer(_sentence(points), verdicts, [evidence], notes)


def _weight(value: float) -> str:
    """A weight of skips as text."""
    return "–" if math.isnan(value) else f"{value:.3f}"


def _together(outcomes: list[bool | None]) -> bool | None:
    """False where one outcome is, True where all are, None otherwise."""
    return False if False in outcomes else None if None in outcomes or not outcomes else True


def _collapse_verdict(points: pl.DataFrame, sizes: Sizes) -> HypothesisVerdict:
    """Whether every network collapses on the way down, between readings that do not exclude the published weights."""
    weights = points["collapse"].drop_nans().to_list()
    least, most = PUBLISHED_WEIGHTS
    published = [weight <= most and weight * sizes.factor >= least for weight in weights]
    ours = f"{len(weights)} of {points.height} collapse"
    if weights:
        ours += (
            f", at weights of {spread(weights)}; {sum(published)} of them at {least:g} to {most:g}, within one reading"
        )
    return HypothesisVerdict(ours, all(published) and len(published) == points.height if points.height else None)


def _ratio_verdict(points: pl.DataFrame, sizes: Sizes) -> HypothesisVerdict:
    """Whether no network that collapsed recovers below twelve times the weight of its collapse.

    Both weights are known to one reading: the ratio of the crossings is between the ratio that was read, and that over
    the square of the factor. A network that is back only at weight 1 has not shown how much more it would have needed.
    """
    collapsed = points.filter(pl.col("collapse").is_not_nan())
    if not collapsed.height:
        return HypothesisVerdict("no network collapses", None)
    outcomes: list[bool | None] = []
    for recovery, ratio in collapsed.select("recovery", "ratio").iter_rows():
        if math.isnan(ratio) or ratio / sizes.factor**2 >= PUBLISHED_RATIO:
            outcomes.append(True)
        else:
            outcomes.append(None if ratio >= PUBLISHED_RATIO or recovery >= 1.0 else False)
    return HypothesisVerdict(_recoveries(collapsed), _together(outcomes))


def _recoveries(collapsed: pl.DataFrame) -> str:
    """How many of the networks that collapsed recover, and at how many times the weight of their collapse."""
    ratios = collapsed["ratio"].drop_nans().to_list()
    return f"{len(ratios) or 'none'} of {collapsed.height} recover" + (
        f", at {spread(ratios, '.1f')} times that of collapse" if ratios else ""
    )


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
    for short_lag, long_lag in logs:
        if short_lag <= unsure:
            outcomes.append(None)  # no lag that readings could tell
        elif long_lag - unsure >= SAME_LAG * short_lag:
            outcomes.append(True)
        else:
            outcomes.append(False if long_lag < SAME_LAG * (short_lag - unsure) else None)
    texts = [spread([math.exp(pair[k]) for pair in logs], ".1f") for k in (0, 1)]
    ours = (
        f"of {pairs.height} pairs {outcomes.count(True)} have the same lag, {outcomes.count(False)} a smaller one, "
        f"{outcomes.count(None)} cannot be told; recovery over collapse {texts[0]} on ramps of {sizes.ramps[0]} steps, "
        f"{texts[1]} on ramps of {sizes.ramps[1]}"
    )
    return HypothesisVerdict(ours, _together(outcomes))


def _sentence(points: pl.DataFrame) -> str:
    """The answer in one or two sentences."""
    if not points.height:
        return "Cannot be told: no network had learnt when its skips began to fall."
    parts = []
    for measure in ("residual", "gradient"):
        of_measure = points.filter(measure=measure)
        collapsed = of_measure.filter(pl.col("collapse").is_not_nan())
        if collapsed.height:
            weights = spread(collapsed["collapse"].to_list(), ".2g")
            parts.append(
                f"by {NAMES[measure]} {collapsed.height} of {of_measure.height} networks collapse, at a weight of "
                f"{weights}, and {_recoveries(collapsed)}"
            )
        else:
            parts.append(f"by {NAMES[measure]} none of {of_measure.height} networks collapses")
    collapsed = points.filter(pl.col("collapse").is_not_nan())
    back = collapsed["ratio"].is_not_nan()
    lead = (
        "No network collapses" if not collapsed.height else "Yes" if back.all() else "Some do" if back.any() else "No"
    )
    return f"{lead}: while skips fall to {LOWEST:g}, {'; '.join(parts)}."


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
    if name in MEASURES:
        axes.axhline(MEASURES[name], color="grey", linewidth=0.9, linestyle=":")
    elif table.height:
        axes.axhline(float(table["blind"][0]), color="grey", linewidth=0.9)
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
        "A lag of so many steps makes ln(recovery / collapse) half as large on a ramp twice as long; hysteresis in the "
        "weight leaves it as it is."
    ),
    refuted_by="Recovery at less than twice the weight of collapse in most seeds; another task, width, rate or ramp.",
    quick=QUICK, full=FULL, gather=gather, answer=answer, draw=draw, seconds=600.0,
    caption="Solid, pointing left: skips fall; dashed, pointing right: they rise again. One line for each seed. "
            "Dotted: below it a network has collapsed. Grey band: weights at which collapse was published.",
)  # fmt: skip

"""Hysteresis: a trained network loses its skips, collapses, and gets them back. When does it recover?

Hofmann & Mäder (2026) ramp the weight of skips down during training. Tokens collapse at a weight of 0.02 to 0.03; when
the weight is ramped up again, the network recovers only at twelve times that, or not at all. They have no public code,
and draw numbers below 1e-13 as zero.

Here the same, every few steps of the training read in deviation arithmetic, so that no number is too small. A network
counts as **collapsed** where the gradient of queries and keys, its median over layers, is below 1e-6.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import polars as pl

from rankscope.figures.matplotlib import Figure, palette, panels
from rankscope.forecasts.layers import by_layer
from rankscope.forecasts.plan import Plan
from rankscope.lab import Initialisation, Recipe
from rankscope.lab.tasks import NextCharacter
from rankscope.studies.questions.question import HypothesisVerdict, Question, StudyAnswer, Tables
from rankscope.studies.study import PageTable, Setup

LOWEST = 0.02  # The least weight of skips
COLLAPSED = -6.0  # log10 of the gradient of queries and keys below which a network is collapsed
PUBLISHED_RATIO = 12.0  # The weight at recovery over that at collapse, at least
PHASES = ("before", "down", "bottom", "up", "after")


@dataclass(frozen=True)
class ConstantRate(Recipe):
    """A training whose learning rate rises and then stays."""

    def lr_scale(self, step: int) -> float:
        """The share of the learning rate at a step."""
        return min(1.0, (step + 1) / max(1, round(self.warmup * self.steps)))


@dataclass(frozen=True)
class Sizes:
    """How large the experiment is."""

    depths: tuple[int, ...]
    width: int
    seeds: int
    settle: int  # Steps at weight 1, before and after
    ramp: int  # Steps of each ramp
    every: int  # Steps between readings

    @property
    def steps(self) -> int:
        """How many steps one training has, all phases together."""
        return 2 * self.settle + 2 * self.ramp + self.bottom

    @property
    def bottom(self) -> int:
        """Steps at the least weight."""
        return self.ramp // 4

    def weight(self, step: int) -> tuple[str, float]:
        """(phase, weight of skips) at a step, from 0.

        >>> sizes = Sizes((2,), 8, 1, settle=10, ramp=20, every=5)
        >>> [sizes.weight(step)[0] for step in (0, 12, 31, 40, 60)]
        ['before', 'down', 'bottom', 'up', 'after']
        """
        ends = np.cumsum([self.settle, self.ramp, self.bottom, self.ramp])
        phase = PHASES[int(np.searchsorted(ends, step, side="right"))]
        if phase == "down":
            return phase, LOWEST ** ((step - ends[0] + 1) / self.ramp)
        if phase == "up":
            return phase, LOWEST ** (1 - (step - ends[2] + 1) / self.ramp)
        return phase, LOWEST if phase == "bottom" else 1.0


QUICK = Sizes(depths=(6, 12), width=64, seeds=2, settle=100, ramp=160, every=20)
FULL = Sizes(depths=(12, 24), width=128, seeds=3, settle=200, ramp=800, every=100)


def trajectory(layers: int, seed: int, sizes: Sizes, device: str = "cpu") -> Iterator[dict[str, float | str]]:
    """Train one network along the schedule, and yield what is read every few steps.

    Args:
        layers: The depth of the network.
        seed: What weights and samples are drawn from.
        sizes: Width, steps and how often is read.
        device: Where it is trained; readings are taken on the CPU.

    Yields:
        layers · seed · step · phase · weight · loss (the mean since the last reading) · blind · residual · gradient
        (both log10; the gradient of queries and keys, the median over layers).
    """
    task = NextCharacter()
    arch = task.architecture(layers, sizes.width, 4)
    plan = Plan(arch, task, ConstantRate(steps=sizes.steps), Initialisation("xavier"), seed=seed)
    training = plan.training(device, capture=False)  # recorded steps would keep the weight of skips
    model, blind = training.models[0], task.blind
    for step in training:
        phase, weight = sizes.weight(step - 1)
        if step % sizes.every == 0:
            on_cpu = copy.deepcopy(model).to("cpu")
            table, _, _ = by_layer(on_cpu, replace(plan, arch=model.net.arch), theory=False)
            gradients = np.array([table[kind].to_numpy()[1:] for kind in ("query", "key")])
            recent = [float(loss) for loss in training.losses[-sizes.every :]]
            yield {
                "layers": layers, "seed": seed, "step": step, "phase": phase, "weight": weight,
                "loss": sum(recent) / len(recent), "blind": blind, "residual": table["residual"][-1],
                "gradient": float(np.nanmedian(gradients)),
            }  # fmt: skip
        if step < sizes.steps:
            _, following = sizes.weight(step)
            model.net.arch = model.net.arch.replace(attention_skip=following, mlp_skip=following)


def turning_points(table: pl.DataFrame) -> tuple[float, float]:
    """(The largest weight on the way down from which on a network is collapsed, the weight on the way up at which it is
    so no more) of one trajectory; NaN where that does not happen.

    Args:
        table: Rows of `trajectory`, of one network.
    """
    down = table.filter(pl.col("phase").is_in(["down", "bottom"])).sort("step")
    up = table.filter(pl.col("phase").is_in(["up", "after"])).sort("step")
    below = [row["weight"] for row in down.iter_rows(named=True) if row["gradient"] < COLLAPSED]
    if not below:
        return math.nan, math.nan
    back = [row["weight"] for row in up.iter_rows(named=True) if row["gradient"] >= COLLAPSED]
    return max(below), min(back, default=math.nan)


def gather(setup: Setup, sizes: Sizes) -> dict[str, pl.DataFrame]:
    """Train every network along the schedule: one cached piece each."""
    parts = {
        f"{layers} layers, seed {seed}": lambda layers=layers, seed=seed: pl.DataFrame(
            list(trajectory(layers, seed, sizes, setup.device))
        )
        for layers, seed in product(sizes.depths, range(sizes.seeds))
    }
    return {"trajectories": setup.cached_parts(parts, sizes=repr(sizes))}


def answer(tables: Tables, sizes: Sizes) -> StudyAnswer:
    """The answer that the trajectories give."""
    table = tables["trajectories"]
    weights = [
        (layers, seed, *turning_points(part))
        for (layers, seed), part in table.group_by("layers", "seed", maintain_order=True)
    ]
    points = pl.DataFrame(weights, schema=["layers", "seed", "collapse", "recovery"], orient="row")
    points = points.with_columns(ratio=pl.col("recovery") / pl.col("collapse"))
    rows = [
        [str(layers), str(seed), f"{collapse:.3f}", f"{recovery:.3f}", f"{ratio:.1f}"]
        for layers, seed, collapse, recovery, ratio in points.iter_rows()
    ]
    evidence = PageTable(
        "Weight of skips at which each network collapses and recovers (nan: it does not)",
        ["layers", "seed", "collapse", "recovery", "recovery / collapse"], rows,
    )  # fmt: skip
    notes = [
        f"{sizes.seeds} seeds, width {sizes.width}, {sizes.steps} steps of AdamW at a constant 1e-3; skips fall from "
        f"1 to {LOWEST} in {sizes.ramp} steps and rise again."
    ]
    verdicts = [_collapse_verdict(points), _ratio_verdict(points)]
    return StudyAnswer(_summary(table, points), verdicts, [evidence], notes)


def _collapse_verdict(points: pl.DataFrame) -> HypothesisVerdict:
    """Whether every network collapses on the way down."""
    weights = points["collapse"].drop_nans().to_list()
    where = f", at weights of {min(weights):.3f} to {max(weights):.3f}" if weights else ""
    return HypothesisVerdict(f"{len(weights)} of {points.height} collapse{where}", len(weights) == points.height)


def _ratio_verdict(points: pl.DataFrame) -> HypothesisVerdict:
    """Whether no network that collapsed recovers below twelve times the weight of its collapse."""
    if not points["collapse"].drop_nans().len():
        return HypothesisVerdict("no network collapses", None)
    ratios = points["ratio"].drop_nans().to_list()
    ours = f"{len(ratios)} recover, at {min(ratios):.1f} to {max(ratios):.1f} times" if ratios else "none recovers"
    return HypothesisVerdict(ours, not ratios or min(ratios) >= PUBLISHED_RATIO)


def _summary(table: pl.DataFrame, points: pl.DataFrame) -> str:
    least, collapsed = float(table["residual"].drop_nans().min()), points["collapse"].drop_nans().len()  # type: ignore[arg-type]
    back = points["ratio"].drop_nans()
    middle = float(np.median(back.to_numpy())) if back.len() else math.nan
    lasting = f"{back.len()} recover, at {middle:.1f} times the weight (median)" if back.len() else "none recovers"
    return (
        f"{collapsed} of {points.height} networks collapse on the way down; {lasting}. The least relative residual is "
        f"1e{least:.0f}."
    )


def draw(tables: Tables, sizes: Sizes) -> dict[str, Figure]:
    """Loss, residual and gradient against the weight of skips, on the way down and up."""
    table = tables["trajectories"]
    figure, (loss, residual, gradient) = panels(3, width=4.4, height=3.8)
    ways = {"down": (("before", "down", "bottom"), "-"), "up": (("bottom", "up", "after"), "--")}
    for k, ((layers,), of_depth) in enumerate(table.group_by("layers", maintain_order=True)):
        for (seed,), of_seed in of_depth.group_by("seed", maintain_order=True):
            for way, (phases, dash) in ways.items():
                part = of_seed.filter(pl.col("phase").is_in(phases)).sort("step")
                label = f"{layers} layers, {way}" if seed == 0 else None
                for axes, name in ((loss, "loss"), (residual, "residual"), (gradient, "gradient")):
                    axes.plot(part["weight"], part[name], dash, color=palette()[k], label=label, linewidth=1.4)
    loss.axhline(float(table["blind"][0]), color="grey", linewidth=0.8)
    for axes, title in ((loss, "Loss (grey: guessing)"), (residual, "log10 of the residual of tokens"),
                        (gradient, "log10 of the gradient of queries and keys")):  # fmt: skip
        axes.set_xscale("log")
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_xlabel("weight of skips")
    loss.legend(fontsize=8, frameon=False, loc="best")
    return {QUESTION.name: figure}


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
    ),
    method=(
        "A decoder with norms before its branches learns the next character at a constant rate. Its skips have weight "
        "1, then fall geometrically to 0.02, stay there, and rise again. Every few steps the relative residual of "
        "tokens after the last layer and the gradients of queries and keys (the median over layers) are read in "
        "deviation arithmetic. A network counts as collapsed where that median is below 1e-6."
    ),
    refuted_by="Recovery at less than twice the weight of collapse in most seeds; another task, width, rate or ramp.",
    quick=QUICK, full=FULL, gather=gather, answer=answer, draw=draw, seconds=180.0,
    caption="Solid: skips fall; dashed: they rise again. One line for each seed.",
)  # fmt: skip

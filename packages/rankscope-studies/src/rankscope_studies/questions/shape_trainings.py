"""Shapes of networks at equal parameters or compute, tuned, trained and measured; and pure attention by width.

`width_depth.py` asks the question; each function here gives one piece of its tables.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl
import torch

from rankscope.forecasts import Design, Recipe, forecast
from rankscope.lab import Initialisation, release_memory
from rankscope.nets import Architecture, Transformer
from rankscope.profiles import measure
from rankscope.sources import bundled_excerpts, word_tokens
from rankscope.theory import log_base, log_gamma, observe
from rankscope_studies.trial import NONE, Trial, TrialSizes, train_until

FAMILIES = ("parameters", "compute")
HEADS = 4
TUNING = 100  # The first of the seeds that learning rates are chosen on; reported networks have other seeds
RESIDUAL = "relative_residual"
FRESH, PLACE, CHANCE, LENGTH = "fresh_residual", "forecast_place", "forecast_probability", "path_length"
BLIND, RATE = "blind", "rate"  # The loss of a guess by frequency; the learning rate that was chosen
QUANTITIES = ("loss", "accuracy", RESIDUAL, "entropy", "parameters", LENGTH, FRESH, PLACE, CHANCE, BLIND, RATE)
CONSTANTS = ("left", "relative", "c", "scores", "values", "bound", "bound_scores", "bound_values", "gamma")
ROWS = {
    "family": pl.String, "layers": pl.Int64, "width": pl.Int64, "seed": pl.Int64, "quantity": pl.String,
    "value": pl.Float64,
}  # fmt: skip
TUNED = {"layers": pl.Int64, "width": pl.Int64, "rate": pl.Float64, "seed": pl.Int64, "loss": pl.Float64}
PURE = {"width": pl.Int64, "seed": pl.Int64, "quantity": pl.String, "log10": pl.Float64}


@dataclass(frozen=True)
class ShapeSizes:
    """How large the experiment is."""

    depths: tuple[int, ...]
    middle_depth: int  # The shape that both families share
    middle_width: int
    context: int
    batch: int
    steps: int
    rates: tuple[float, ...]  # Learning rates of which each shape gets its best
    tuning_seeds: int
    seeds: int
    widths: tuple[int, ...]  # Of pure attention, at one depth
    pure_depth: int
    pure_tokens: int
    pure_seeds: int


def shapes(sizes: ShapeSizes) -> list[tuple[str, int, int]]:
    """(family, layers, width) of every shape; widths are multiples of the number of heads.

    Of equal parameters, `L d^2` is the same for all shapes; of equal compute, `L (24 d^2 + 4 n d)` is: the operations
    of one token among n in all blocks.
    """
    n, entries = sizes.context, []
    parameters = sizes.middle_depth * sizes.middle_width**2
    compute = sizes.middle_depth * (24 * sizes.middle_width**2 + 4 * n * sizes.middle_width)
    for layers in sizes.depths:
        entries.append(("parameters", layers, _whole_heads(math.sqrt(parameters / layers))))
        of_layer = compute / layers  # 24 d^2 + 4 n d, solved for d
        entries.append(("compute", layers, _whole_heads((math.sqrt(16 * n**2 + 96 * of_layer) - 4 * n) / 48)))
    return entries


def _whole_heads(width: float) -> int:
    return max(2 * HEADS, HEADS * round(width / HEADS))


def _trial(layers: int, width: int, rate: float, seeds: Sequence[int], sizes: ShapeSizes) -> Trial:
    chosen = TrialSizes(width=width, heads=HEADS, context=sizes.context, batch=sizes.batch, steps=sizes.steps, lr=rate)
    return Trial(NONE, "pre", layers, tuple(seeds), chosen)


def tuned(layers: int, width: int, rate: float, sizes: ShapeSizes, device: str = "cpu") -> pl.DataFrame:
    """Held-out losses of a shape at one learning rate, on the tuning seeds; infinite where a training diverged."""
    seeds = range(TUNING, TUNING + sizes.tuning_seeds)
    training = _trial(layers, width, rate, seeds, sizes).training(device)
    alive = train_until(training)
    losses = [evaluation.loss for evaluation in training.evaluate(TrialSizes().evaluation_samples)]
    del training
    release_memory(device)
    rows = [
        (layers, width, rate, seed, loss if well and math.isfinite(loss) else math.inf)
        for seed, loss, well in zip(seeds, losses, alive, strict=True)
    ]
    return pl.DataFrame(rows, schema=TUNED, orient="row")


def best_rate(tuning: pl.DataFrame, layers: int, width: int) -> float:
    """The learning rate of the lowest median loss of a shape over tuning seeds; the smaller one where two are equal."""
    rows = tuning.filter(layers=layers, width=width).group_by("rate").agg(pl.col("loss").median()).sort("loss", "rate")
    return float(rows["rate"][0])


def before_rows(layers: int, width: int, sizes: ShapeSizes) -> pl.DataFrame:
    """What is known of a shape before it is trained: its forecast with the first seed, at the lab's usual rate, and
    log10 of the relative residual after the last layer with every seed."""
    usual = TrialSizes()
    trial = _trial(layers, width, usual.lr, range(sizes.seeds), sizes)
    training = trial.training()
    start = Initialisation(usual.scheme, usual.embedding_std)
    recipe = Recipe(steps=sizes.steps, lr=usual.lr, batch_size=sizes.batch)
    expected = forecast(training.models[0].net.arch, design=Design(trial.task, init=start), recipe=recipe)
    rows: list[tuple[int, str, float]] = [
        (0, PLACE, expected.place), (0, CHANCE, expected.probability), (0, BLIND, trial.task.blind),
    ]  # fmt: skip
    for seed, net, X in zip(training.seeds, training.networks(), training.tokens()[0], strict=True):
        profile = measure(net.to(torch.float64), X.double(), metrics=RESIDUAL)
        logs, marks = (profile.curve(RESIDUAL, column)[:, -1] for column in ("log10", "below_floor"))
        rows.append((seed, FRESH, float(logs.mean()) if not bool((marks == 1).any()) else math.nan))
    return _framed(layers, width, rows)


def after_rows(layers: int, width: int, rate: float, sizes: ShapeSizes, device: str = "cpu") -> pl.DataFrame:
    """What became of a shape at its learning rate, with every reported seed: loss, residual, entropy, path lengths."""
    trial = _trial(layers, width, rate, range(sizes.seeds), sizes)
    readings = trial.table(device).filter(pl.col("value").is_not_null())
    reported = readings.filter(pl.col("quantity").is_in(QUANTITIES))
    rows = [*reported.select("seed", "quantity", "value").iter_rows()]
    rows += [(seed, LENGTH, _mean_length(readings.filter(seed=seed))) for seed in range(sizes.seeds)]
    return _framed(layers, width, [*rows, (0, RATE, rate)])


def _framed(layers: int, width: int, rows: Sequence[tuple[int, str, float]]) -> pl.DataFrame:
    kinds = {name: kind for name, kind in ROWS.items() if name != "family"}
    return pl.DataFrame([(layers, width, *row) for row in rows], schema=kinds, orient="row")


def _mean_length(rows: pl.DataFrame) -> float:
    """How many heads the paths that carry the output go through, on average; a negative share counts by its size."""
    shares = {
        int(quantity.removeprefix("path_share_")): abs(value)
        for quantity, value in rows.select("quantity", "value").iter_rows()
        if quantity.startswith("path_share_")
    }
    total = sum(shares.values())
    return sum(length * share for length, share in shares.items()) / total if total else math.nan


def pure_constants(width: int, seed: int, sizes: ShapeSizes) -> pl.DataFrame:
    """log10 of c in `||R_L|| = c ||R_{L-1}||^3`, of a fresh network of heads alone, and of what the bound has for it.

    R is the residual about the mean, in the measure of the bound, `||R|| = sqrt(||R||_1 ||R||_inf)`. Once tokens are
    nearly the same, a layer of pure attention cubes what they differ by. Quantities, all of the last layer:

    | quantity       | what it is                                                                        |
    |----------------|-----------------------------------------------------------------------------------|
    | `left`         | the relative residual after the last layer, in deviation arithmetic               |
    | `relative`     | the same constant as c, of relative residuals: without a unit                     |
    | `c`            | measured in deviation arithmetic; NaN where rounding decided                      |
    | `scores`       | `o / ||R||^2`, o the largest difference between two scores of a row, over heads   |
    | `values`       | `c / scores`: what values and the average over keys make of scores                |
    | `bound`        | `4 kappa gamma beta H / sqrt(d_qk)`, which c cannot exceed                        |
    | `bound_scores` | `max_h ||W_QK,h||_1 / sqrt(d_qk)`, the bound's part for scores                    |
    | `bound_values` | `bound / bound_scores`                                                            |
    | `gamma`        | that of the bound                                                                 |
    """
    arch = Architecture(layers=sizes.pure_depth, width=width, heads=HEADS)
    net = Transformer.random(arch, seed=seed, init="xavier").variant("san")
    X, padding = word_tokens(bundled_excerpts(sizes.pure_tokens)[:1], width, sizes.pure_tokens)
    profile = measure(net, X, padding, ["residual", RESIDUAL])
    known = not bool((profile.curve("residual", "below_floor")[0, -2:] == 1).any())
    before, after = (float(log) for log in profile.curve("residual", "log10")[0, -2:])
    relative_before, left = (float(log) for log in profile.curve(RESIDUAL, "log10")[0, -2:])
    facts = observe(net, X[0], padding=None if padding is None else padding[0])
    layer, ten = facts.layers[-1], math.log(10)
    logs = {
        "left": left,
        "relative": left - 3 * relative_before,
        "c": after - 3 * before,
        "scores": layer.log_oscillation / ten - 2 * before,
        "bound": log_base(facts, layer, log_gamma(layer)) / ten,
        "bound_scores": float(layer.heads.scores.log().max()) / ten - math.log10(arch.divisor),
        "gamma": log_gamma(layer) / ten,
    }
    logs["values"] = logs["c"] - logs["scores"]
    logs["bound_values"] = logs["bound"] - logs["bound_scores"]
    rows = [(width, seed, name, logs[name] if known else math.nan) for name in CONSTANTS]
    return pl.DataFrame(rows, schema=PURE, orient="row")

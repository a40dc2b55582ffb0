"""A forecast in sentences: will it learn, where do tokens and gradients go, and what is to blame."""

import math
from collections.abc import Sequence
from typing import Any

import polars as pl

from rankscope.forecasts.plan import DescribedPlan, Plan
from rankscope.forecasts.predictor import Prediction, Predictor

ALIKE = -2.0  # log10 of the relative residual below which tokens count as the same: they have 99% in common
FALLEN = 3.0  # By how many decades a gradient must have fallen to be spoken of
BLAMED = 0.5  # The log of the odds that a group of readings must cost to be blamed
GROUPS: dict[str, tuple[str, ...]] = {
    "tokens are more alike than in designs that learn": (
        "residual_", "drift_residual_", "share_batch", "drift_share_batch",
    ),
    "the output hangs on a token itself or its position, not on the tokens before it": (
        "share_current", "share_position", "drift_share_current", "drift_share_position",
    ),
    "gradients do not reach the weights": (
        "reach_", "lowest_", "tilt_", "drift_reach_", "drift_lowest_", "drift_tilt_",
    ),
    "batches pull the weights in different directions": ("agreement_", "drift_agreement_"),
    "attention is too sharp or too even": ("entropy_", "drift_entropy_"),
    "the loss starts too high": ("start_loss", "logits_", "drift_logits_"),
    "steps are too long for the curvature of the loss": ("curvature", "edge", "rate"),
    "the optimiser moves weights by more than they are": ("weights_",),
}  # fmt: skip
"""What may be to blame, and the readings that say so, by how their names begin."""


def sentences(forecast: Any) -> list[str]:
    """All that a `Forecast` (`forecasting.py`, which calls this) says, most important first."""
    table, readings, prediction, doubts = forecast.table, forecast.readings, forecast.prediction, forecast.doubts
    layers = [*_tokens(table), *_gradients(table)] if table.height else []
    blamed = _blame(forecast.plan.task_name, readings) if prediction.probability <= 0.5 else []
    further = [f"{note[0].upper()}{note[1:]}." for note in forecast.notes if note not in doubts[:1]]
    return [_chance(forecast.plan, prediction, doubts), *layers, *blamed, *further]


def chance_words(probability: float, guess: bool = False) -> str:
    """A probability in words, which say so if it is a guess.

    >>> chance_words(0.97), chance_words(0.5, guess=True)
    ('will learn', 'may learn or not, as a guess')
    """
    words = ((0.9, "will learn"), (0.7, "will probably learn"), (0.3, "may learn or not"), (0.1, "will hardly learn"))
    phrase = next((text for least, text in words if probability >= least), "will not learn")
    return f"{phrase}, as a guess" if guess else phrase


def place_of_100(place: float) -> int:
    """A place from 0 to 1 as one of 1 to 100.

    >>> place_of_100(0.0), place_of_100(1.0)
    (1, 100)
    """
    return round(1 + 99 * place)


def _chance(plan: Plan | DescribedPlan, prediction: Prediction, doubts: Sequence[str]) -> str:
    recipe, doubt = plan.recipe, ""
    if doubts:
        more = ", among other reasons below" if len(doubts) > 1 else ""
        doubt = f"a guess, since {doubts[0]}{more}; going by designs that read most like it, "
    expected_place = f"place {place_of_100(prediction.place)} of 100 (± {100 * prediction.place_spread:.0f})"
    return (
        f"{plan.layers} layers, {recipe.steps} steps at {recipe.lr:g} on {plan.task_name}: {doubt}it "
        f"{chance_words(prediction.probability)} (probability {prediction.probability:.2f}); among designs of the lab "
        f"its loss is expected at {expected_place}, 1 the best."
    )


def _tokens(table: pl.DataFrame) -> list[str]:
    """Where tokens become the same."""
    known = [(layer, log) for layer, log in enumerate(table["residual"].to_list()) if not math.isnan(log)]
    if not known:
        return ["Rounding decided what tells tokens apart in every layer: nothing is known of it."]
    layer, last = known[-1]
    where = "after the last layer" if layer == table.height - 1 else f"after layer {layer}, the last that is known,"
    if last >= ALIKE:
        return [f"Tokens stay apart: {where} their relative residual is {10**last:.2g}; 0 is all the same."]
    apart = [layer for layer, log in known if log >= ALIKE]
    first = apart[-1] + 1 if apart else 0
    return [
        f"Tokens become the same: from layer {first} on their relative residual is below 0.01, {where} {_power(last)}."
    ]


def _power(log: float) -> str:
    """A power of ten in words; nothing at all is one too."""
    return "nothing" if log == -math.inf else f"1e{log:.0f}"


def _gradients(table: pl.DataFrame) -> list[str]:
    """By how much gradients fall, of the kinds of weights that they fall most of."""
    lines, at_tokens = [], table["gradient"].to_list()
    fall = at_tokens[-1] - at_tokens[0]
    if fall > FALLEN:
        lines.append(f"Gradients vanish: at the first tokens they are {_power(-fall)} of those at the last.")
    elif fall < -FALLEN:
        lines.append(f"Gradients explode: at the first tokens they are {_power(-fall)} times those at the last.")
    values = table["value"].to_list()[1:]
    for kind, plural in (("query", "queries"), ("key", "keys")):
        gaps = [
            (value - log, layer)
            for layer, (log, value) in enumerate(zip(table[kind].to_list()[1:], values, strict=True), 1)
            if not math.isnan(value - log)
        ]
        if gaps and max(gaps)[0] > FALLEN:
            gap, layer = max(gaps)
            lines.append(f"Weights of {plural} in layer {layer} get {_power(-gap)} of the gradient of values.")
    return lines


def _blame(task: str, readings: dict[str, float]) -> list[str]:
    """What lowers the chance most: each group of readings in turn is put to what networks have that learn the task."""
    predictor = Predictor.shipped().knowing(readings)
    learners = predictor.median_of_learners(task)
    points, groups = [{name: readings[name] for name in predictor.names}], []
    for group, begins in GROUPS.items():
        if changed := {name: learners[name] for name in predictor.names if name.startswith(begins)}:
            points.append(points[0] | changed)
            groups.append(group)
    averages = [predictor.predict_all(pl.DataFrame([point]))[0] for point in points]
    base, *odds = (float(predictor.log_odds(average)[0]) for average in averages)
    gains = [(log - base, group) for log, group in zip(odds, groups, strict=True)]
    blamed = [group for gain, group in sorted(gains, reverse=True)[:2] if gain > BLAMED]
    return [f"To blame: {', and '.join(blamed)}."] if blamed else []

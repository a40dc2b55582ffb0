"""Bounds that rounding cannot have made: hypotheses decided outward, upper bounds moved up, lower ones down.

Several passes, all but the first perturbed in their last digits (`deviation/perturbation.py`), give every measured
number several times, and a theorem is evaluated on each: how the outcomes are compared, moved outward, refused and
marked is told in docs/theory.md ("Proofs that survive rounding") and set by the constants below. Norms of weights are
rounded up where they are taken (`weight_norms.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from typing import cast

from rankscope.nets import kernel_of
from rankscope.theory.facts import Facts
from rankscope.theory.hypotheses import SOFTMAX, Hypothesis
from rankscope.theory.observation import Passes
from rankscope.theory.theorem import Evaluation, Theorem

COPIES = 2  # Perturbed passes beside the first
AGREED = 1e-7
"""The largest difference of logs, as a share of them or of one, up to which passes agree on a bound; and the
largest relative difference up to which they agree on what is measured."""
LOOSE = 1e-3  # The same where the centre is the argmin, found by linear programmes to 1e-5
SEEN = 1e-8  # The largest relative difference up to which float64 agrees with deviation arithmetic
TIMES = 100.0  # Outward by this many times what the passes differ by
ARITHMETIC = 1e-12  # Outward by this share of the largest log so far: hundreds of operations, each to 1e-16
ROUNDING = "its inputs are rounding"


@dataclass(frozen=True)
class LayerBound:
    """A theorem at one layer: its bound moved outward, its hypotheses, and the measured value."""

    bound: float  # NaN where a hypothesis is not met
    hypotheses: list[Hypothesis]
    measured: float
    noise: bool  # True if the passes do not agree on the measured value


def layer_bounds(theorem: Theorem, passes: Passes, marked: Sequence[bool]) -> list[LayerBound]:
    """Evaluate a theorem on the facts of several passes over one sample, at every layer from 1 on.

    `marked` says of each layer, from 0 on, whether its tokens are rounding noise (`noisy_layers`).
    """
    copies = passes.facts
    evaluations = [theorem.evaluate(facts) for facts in copies]
    measured = _measured(theorem, passes, evaluations)
    size, float64_difference, rows = 1.0, 0.0, []
    for layer in range(1, copies[0].depth + 1):
        hypotheses = _hypotheses(evaluations, layer)
        bounds = [evaluation.bounds[layer - 1] for evaluation in evaluations]
        float64_difference = max(float64_difference, passes.agreement[layer].float64_difference)
        if float64_difference > SEEN:
            sentence = f"{ROUNDING}: difference from what float64 sees of the tokens, as a share"
            hypotheses.append(Hypothesis(sentence, float64_difference, f"<= {SEEN:g}", False))
        for bound in filter(math.isfinite, bounds):
            size = max(size, 1 + abs(bound))
        bound = math.nan
        if all(hypothesis.met for hypothesis in hypotheses):
            bound, refusal = _outward(theorem, copies[0], layer, bounds, size, float64_difference)
            hypotheses += [] if refusal is None else [refusal]
        value, known = measured[layer - 1]
        rows.append(LayerBound(bound, hypotheses, value, marked[layer] or not known))
    return rows


def _measured(theorem: Theorem, passes: Passes, evaluations: Sequence[Evaluation]) -> list[tuple[float, bool]]:
    """(the measured value, whether the passes agree that it is what it is) of every layer from 1 on."""
    own = [evaluation.measured for evaluation in evaluations]
    if all(measured is None for measured in own) and theorem.quantity in passes.memo:
        return cast(list[tuple[float, bool]], passes.memo[theorem.quantity])
    of_copies = [
        [getattr(sizes, theorem.quantity) for sizes in facts.sizes[1:]] if measured is None else measured
        for facts, measured in zip(passes.facts, own, strict=True)
    ]
    first, rows = passes.facts[0], []
    for layer, values in enumerate(zip(*of_copies, strict=True), 1):
        if theorem.quantity == "affine_rank":
            known = all(half.clear for facts in passes.facts for half in facts.layers[layer - 1].halves)
        else:
            known = values[0] != -math.inf or _exactly_zero(first, layer)
        rows.append((values[0], known and _alike(values, first.centre)))
    if all(measured is None for measured in own):
        passes.memo[theorem.quantity] = rows
    return rows


def noisy_layers(passes: Passes) -> list[bool]:
    """True for each layer, from 0 on, whose tokens are rounding noise."""
    noisy, gone = [], False
    for layer, agreement in enumerate(passes.agreement):
        blind = any(facts.sizes[layer].noise for facts in passes.facts)
        if layer > 0:
            gone = gone or any(half.vanished for facts in passes.facts for half in facts.layers[layer - 1].halves)
            gone = gone or bool(agreement.lost or agreement.undecided)
            # Other tokens are looked at, and it does not show.
            gone = gone or bool(agreement.difference <= AGREED and agreement.elsewhere)
        disagree = not agreement.difference <= AGREED or agreement.float64_difference > SEEN
        noisy.append(blind or gone or disagree)
    return noisy


def _alike(logs: Sequence[float], centre: str) -> bool:
    """True if the passes agree on a number, or none of them has one."""
    if all(map(math.isnan, logs)) or len(set(logs)) == 1:
        return True
    allowed = (LOOSE if centre == "argmin" else AGREED) * max(1.0, abs(max(logs, key=abs)) / 1e3)
    return bool(max(logs) - min(logs) <= allowed)


def _hypotheses(evaluations: Sequence[Evaluation], layer: int) -> list[Hypothesis]:
    """The hypotheses of one layer, met only where every pass meets them with room for rounding."""
    of_passes = zip(*(evaluation.hypotheses[layer - 1] for evaluation in evaluations), strict=True)
    return list(map(_decided, of_passes))


@lru_cache(maxsize=1024)
def _decided(same: tuple[Hypothesis, ...]) -> Hypothesis:
    """One hypothesis as all passes have it; most are the same objects in many layers and theorems."""
    worst, met = same[0], all(hypothesis.met for hypothesis in same)
    rooms = [hypothesis.room for hypothesis in same if hypothesis.room != math.inf]
    if rooms:  # measured
        numbers = [hypothesis.number for hypothesis in same]
        off = TIMES * (max(numbers) - min(numbers)) + ARITHMETIC * max(map(abs, numbers))
        worst = min(same, key=attrgetter("room"))
        met = met and min(rooms) > off
    return worst if worst.met == met else replace(worst, met=met)


def _outward(
    theorem: Theorem, facts: Facts, layer: int, bounds: Sequence[float], size: float, float64_difference: float
) -> tuple[float, Hypothesis | None]:
    """The bound moved outward, and the failed hypothesis where there is no bound."""
    upper = theorem.kind == "upper"
    nothing, zero = (math.inf, -math.inf) if upper else (-math.inf, math.inf)
    if any(map(math.isnan, bounds)):
        return math.nan, Hypothesis(f"{ROUNDING}: bounds that are no number", 1.0, "= 0", False)
    if nothing in bounds:
        return nothing, None
    low, high = min(bounds), max(bounds)
    if low == high == zero:
        if upper and _exactly_zero(facts, layer):
            return zero, None
        says = f"{ROUNDING}: factors of exactly zero that rounding may have made"
        return math.nan, Hypothesis(says, 1.0, "= 0", False)
    difference = high - low
    counted = theorem.quantity == "affine_rank"
    agreed = 0.0 if counted else LOOSE if facts.centre == "argmin" else AGREED
    if not difference <= agreed * size:
        says = f"{ROUNDING}: difference of the bound's log between passes that round otherwise, as a share"
        return math.nan, Hypothesis(says, difference / size, f"<= {agreed:g}", False)
    if counted:
        return low, None
    moved = TIMES * (difference + float64_difference) + ARITHMETIC * size
    return high + moved if upper else low - moved, None


def _exactly_zero(facts: Facts, layer: int) -> bool:
    """True if tokens are provably equal at this layer: from the start, or by a layer that makes all equal."""
    if facts.sizes[0].mu == -math.inf or facts.token_count == 1:
        return True
    arch = facts.arch
    if arch.attention_skip != 0.0 or (arch.parallel and arch.mlp != "none") or arch.parts or arch.head_gate:
        return False
    alike = facts.distinct_views == 1 and arch.positions in ("none", "absolute") and arch.kernel in SOFTMAX
    heads = [layer_facts.heads for layer_facts in facts.layers[:layer]]
    blind = alike and any(not bool(norms.scores.any()) for norms in heads)  # attention that sees no token's content
    return blind or (kernel_of(arch.kernel).averages and any(not bool(norms.columns.any()) for norms in heads))

"""Bounds that rounding cannot have made: hypotheses decided outward, upper bounds moved up, lower ones down.

Several passes, all but the first perturbed in their last digits (`deviation/perturbation.py`), give every
measured number several times. A theorem is evaluated on each. Where its bounds differ by more than `AGREED`,
it started from rounding and is refused. Elsewhere the worst of them is moved outward by `TIMES` what they
differ by, or what float64 sees otherwise, and by what the formula's own arithmetic may have lost. A measured
number that a hypothesis is about must keep off its limit by as much, in every pass. Norms of weights are
rounded up where they are taken (`constants.py`).

The measured side is marked where the passes differ on it, on the deviations it is read off, or where float64,
which shares no formula with deviation arithmetic, sees other tokens; and a bound of exactly zero counts only
where zero is exact: equal tokens, weights that are zero, attention that cannot differ.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rankscope.deviation.second_pass import distance, elsewhere, lost, steep, undecided
from rankscope.theory.facts import Facts
from rankscope.theory.hypotheses import SOFTMAX, Hypothesis
from rankscope.theory.theorem import Evaluation, Theorem

COPIES = 2
"""Shaken passes beside the first."""
AGREED = 1e-7
"""The largest difference of logs, as a share of them or of one, up to which passes agree on a bound; and the
largest relative difference up to which they agree on what is measured."""
LOOSE = 1e-3
"""The same where the centre is the argmin, found by linear programmes to 1e-5."""
SEEN = 1e-8
"""The largest relative difference up to which float64 agrees with deviation arithmetic."""
TIMES = 100.0
"""Outward by this many times what the passes differ by."""
ARITHMETIC = 1e-12
"""Outward by this share of the largest log so far: hundreds of operations, each to 1e-16."""
ROUNDING = "its inputs are rounding"


@dataclass(frozen=True)
class Settled:
    """What a theorem says at one layer, outward."""

    bound: float
    hypotheses: list[Hypothesis]
    measured: float
    noise: bool
    """Whether the passes do not agree on what is measured."""


def settled(theorem: Theorem, copies: Sequence[Facts], marked: Sequence[bool]) -> list[Settled]:
    """A theorem on the facts of several passes, by layer from 1 on; `marked` are the layers whose tokens are
    rounding."""
    found = [theorem.evaluate(facts) for facts in copies]
    size, unlike, rows = 1.0, 0.0, []
    for layer in range(1, copies[0].depth + 1):
        hypotheses = _hypotheses(found, layer)
        bounds = [each.bounds[layer - 1] for each in found]
        unlike = max(unlike, copies[0].sizes[layer].unlike)
        if unlike > SEEN:
            said = f"{ROUNDING}: difference from what float64 sees of the tokens, as a share"
            hypotheses.append(Hypothesis(said, unlike, f"<= {SEEN:g}", False))
        size = max([size, *(1 + abs(bound) for bound in bounds if math.isfinite(bound))])
        bound, refusal = _outward(theorem, copies[0], layer, bounds, size, unlike)
        if refusal is not None and all(each.met for each in hypotheses):
            hypotheses.append(refusal)
        values = [_measured(theorem, facts, each, layer) for facts, each in zip(copies, found, strict=True)]
        noise = marked[layer] or not _alike(values, copies[0].centre)
        noise = noise or (values[0] == -math.inf and theorem.quantity != "affine_rank"
                          and not _exactly_zero(copies[0], layer))  # fmt: skip
        if theorem.quantity == "affine_rank":
            noise = noise or not all(
                half.clear for facts in copies for half in facts.layers[layer - 1].halves
            )
        rows.append(Settled(bound, hypotheses, values[0], noise))
    return rows


def _measured(theorem: Theorem, facts: Facts, found: Evaluation, layer: int) -> float:
    if found.measured is not None:
        return found.measured[layer - 1]
    return facts.sizes[layer].of(theorem.quantity)


def noisy_layers(copies: Sequence[Facts]) -> list[bool]:
    """By layer from 0 on, whether its tokens are rounding."""
    first, *others = copies
    found, gone = [], False
    for layer, sizes in enumerate(first.sizes):
        apart = max(
            (float(distance(sizes.state, each.sizes[layer].state)[0]) for each in others), default=0.0
        )
        blind = any(each.sizes[layer].noise for each in copies)
        if layer > 0:
            here, there = first.layers[layer - 1], [each.layers[layer - 1].attention for each in others]
            gone = gone or any(half.vanished for each in copies for half in each.layers[layer - 1].halves)
            gone = gone or bool(lost(first.sizes[layer - 1].state, sizes.state))
            gone = gone or any(bool(undecided(here.attention, P)) for P in there)
            if apart <= AGREED and bool(steep(here.attention)):
                # Other tokens are looked at, and it does not show.
                gone = gone or any(bool(elsewhere(here.attention, P.matrix())) for P in there)
        found.append(blind or gone or not apart <= AGREED or sizes.unlike > SEEN)
    return found


def _alike(logs: Sequence[float], centre: str) -> bool:
    """Whether passes agree on a number; those that have none do."""
    if all(map(math.isnan, logs)) or len(set(logs)) == 1:
        return True
    allowed = (LOOSE if centre == "argmin" else AGREED) * max(1.0, abs(max(logs, key=abs)) / 1e3)
    return bool(max(logs) - min(logs) <= allowed)


def _hypotheses(found: Sequence[Evaluation], layer: int) -> list[Hypothesis]:
    """Met where every pass meets them, measured numbers clear of their limits."""
    decided = []
    for same in zip(*(each.hypotheses[layer - 1] for each in found), strict=True):
        numbers = [each.number for each in same]
        off = TIMES * (max(numbers) - min(numbers)) + ARITHMETIC * max(map(abs, numbers))
        clear = all(each.room == math.inf or each.room > off for each in same)
        worst = min(same, key=lambda each: each.room)
        decided.append(replace(worst, met=all(each.met for each in same) and clear))
    return decided


def _outward(
    theorem: Theorem, facts: Facts, layer: int, bounds: Sequence[float], size: float, unlike: float
) -> tuple[float, Hypothesis | None]:
    """(the bound moved outward, why there is none)."""
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
        said = f"{ROUNDING}: factors of exactly zero that rounding may have made"
        return math.nan, Hypothesis(said, 1.0, "= 0", False)
    apart = high - low
    counted = theorem.quantity == "affine_rank"
    agreed = 0.0 if counted else LOOSE if facts.centre == "argmin" else AGREED
    if not apart <= agreed * size:
        said = f"{ROUNDING}: difference of the bound's log between passes that round otherwise, as a share"
        return math.nan, Hypothesis(said, apart / size, f"<= {agreed:g}", False)
    if counted:
        return low, None
    moved = TIMES * (apart + unlike) + ARITHMETIC * size
    return high + moved if upper else low - moved, None


def _exactly_zero(facts: Facts, layer: int) -> bool:
    """Whether tokens must be equal by this layer: they were, or a layer makes them so whatever they are."""
    if facts.first.R.largest()[0] == 0 or facts.number == 1:
        return True
    arch = facts.arch
    if arch.attention_skip != 0.0 or (arch.parallel and arch.mlp != "none") or arch.parts or arch.head_gate:
        return False
    alike = facts.views == 1 and arch.positions in ("none", "absolute") and arch.kernel in SOFTMAX
    for each in facts.layers[:layer]:
        same = alike and not bool(each.heads.scores.any())  # attention that sees no token's content
        if same or not bool(each.heads.columns.any()):
            return True
    return False

"""Bounds that rounding cannot have made: hypotheses decided outward, upper bounds moved up, lower ones down.

Several passes, all but the first perturbed in their last digits (`deviation/perturbation.py`), give every measured
number several times, and a theorem is evaluated on each: how the outcomes are compared, moved outward, refused and
marked is told in docs/theory.md ("Proofs that survive rounding") and set by the constants below. Norms of weights are
rounded up where they are taken (`weight_norms.py`).

How far the passes agree, layer by layer, is noted by `observation.py`: the pass itself, its copies (`agreement`), and
float64. `Float64Pass` follows the pass in deviation arithmetic, with which it shares no formula. `float64_records`
stands in its place for networks without deviation rules.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import NamedTuple, cast

import torch
from torch import Tensor

from rankscope.deviation import (
    BlockRecord,
    DeviationPattern,
    HalfRecord,
    PerturbedPlain,
    Scaled,
    State,
    at_layer,
    attends_elsewhere,
    can_skip,
    must_compute,
    state_distance,
    steep_scores,
    tokens_lost,
    undecided,
)
from rankscope.nets import Block, PassSettings, Plain, Transformer, kernel_of, traverse
from rankscope.theory.theorem import MET, SOFTMAX, Agreement, Evaluation, Facts, Hypothesis, Passes, PerSample, Theorem

COPIES = 2  # Perturbed passes beside the first
AGREED = 1e-7
"""The largest difference of logs, as a share of them or of one, up to which passes agree on a bound; and the
largest relative difference up to which they agree on what is measured."""
LOOSE = 1e-3  # The same where the centre is the argmin, found by linear programmes to 1e-5
SEEN = 1e-8  # The largest relative difference up to which float64 agrees with deviation arithmetic
TIMES = 100.0  # Outward by this many times what the passes differ by
ARITHMETIC = 1e-12  # Outward by this share of the largest log so far: hundreds of operations, each to 1e-16
ROUNDING = "its inputs are rounding"


def layer_bounds(
    theorem: Theorem, passes: Passes, marked: Sequence[bool]
) -> Iterator[tuple[float, list[Hypothesis], float, bool]]:
    """Evaluate a theorem on the facts of several passes over one sample: of every layer from 1 on (its bound moved
    outward, NaN where a hypothesis is not met; its hypotheses; the measured value; whether the passes disagree on it).

    `marked` says of each layer, from 0 on, whether its tokens are rounding noise (`noisy_layers`).
    """
    copies = passes.facts
    evaluations = [theorem.evaluate(facts) for facts in copies]
    measured = _measured(theorem, passes, evaluations)
    of_layers = zip(*[evaluation.hypotheses for evaluation in evaluations], strict=True)
    bounds_by_layer = zip(*[evaluation.bounds for evaluation in evaluations], strict=True)
    size, float64_difference = 1.0, 0.0
    for layer, (of_passes, bounds) in enumerate(zip(of_layers, bounds_by_layer, strict=True), 1):
        # Met only where every pass meets them with room for rounding.
        hypotheses = list(map(_decided, zip(*of_passes, strict=True)))
        float64_difference = max(float64_difference, passes.agreement[layer].float64_difference)
        if float64_difference > SEEN:
            sentence = f"{ROUNDING}: difference from what float64 sees of the tokens, as a share"
            hypotheses.append(Hypothesis(sentence, float64_difference, f"<= {SEEN:g}", False))
        for bound in filter(math.isfinite, bounds):
            size = max(size, 1 + abs(bound))
        bound = math.nan
        if all(map(MET, hypotheses)):
            bound, refusal = _outward(theorem, copies[0], layer, bounds, size, float64_difference)
            hypotheses += [] if refusal is None else [refusal]
        value, known = measured[layer - 1]
        yield bound, hypotheses, value, marked[layer] or not known


def _measured(theorem: Theorem, passes: Passes, evaluations: Sequence[Evaluation]) -> list[tuple[float, bool]]:
    """(the measured value, whether the passes agree that it is what it is) of every layer from 1 on."""
    own = [evaluation.measured for evaluation in evaluations]
    of_tokens = own == [None] * len(own)
    if of_tokens and theorem.quantity in passes.memo:
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
    if of_tokens:
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


@lru_cache(maxsize=1024)
def _decided(same: tuple[Hypothesis, ...]) -> Hypothesis:
    """One hypothesis as all passes have it; most are the same objects in many layers and theorems."""
    worst, met = same[0], all(map(MET, same))
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


RESOLVED = 1e-4  # The share of the tokens' size by which they must differ for float64 to see it
WITHIN = 300.0  # The largest |log| of the size of tokens that float64 can hold: 1e+-130


class FollowedStates(NamedTuple):
    """A state of the samples, what float64 has in its place, and for which of them that says something."""

    state: State
    float64: State
    followed: Tensor


class Float64Pass:
    """A float64 pass beside deviation arithmetic. It restarts from the deviation state wherever float64 could not
    resolve the residual."""

    def __init__(self, net: Transformer, settings: PassSettings) -> None:
        self.rules = Plain(net.arch, settings)
        self.X: Tensor | None = None
        self.followed: Tensor | None = None  # True for samples whose tokens X still stands for
        self.seen: Tensor | None = None  # True for samples whose tokens after the last block float64 resolves

    def follow(self, block: Block, before: State, after: State) -> FollowedStates | None:
        """The states after a block and float64's, which are to be compared where float64 can resolve them; None where
        it can nowhere. The float64 tokens are asked as well: those of deviation arithmetic may be wrong."""
        X, followed = self.X, self.followed
        seen = visible_to_float64(before) if self.seen is None else self.seen
        self.X = self.followed = self.seen = None
        if not must_compute("float64_pass.seen", seen.any()):
            return None
        if X is None or followed is None:
            X = before.tokens()
        elif not can_skip("float64_pass.followed", followed):
            X = torch.where(followed[:, None, None], X, before.tokens())
        X = traverse(block, self.rules, X).state
        finite = X.isfinite().flatten(1).all(1)
        X = X.masked_fill(~finite[:, None, None], 0.0)
        own_state = State.of(X, after.valid.mask)
        self.seen = visible_to_float64(after)
        self.X, self.followed = X, seen & finite & (visible_to_float64(own_state) | self.seen)
        return FollowedStates(after, own_state, self.followed)


def visible_to_float64(state: State) -> Tensor:
    """True for samples whose tokens float64 can hold, and resolve what they differ by."""
    size = state.log
    return (state.R.log_size() - size > math.log(RESOLVED)) & (size.abs() < WITHIN)


def float64_records(net: Transformer, first: State, settings: PassSettings, copies: int) -> Iterator[BlockRecord]:
    """Run the network in float64 and give a record of each block: its attention pattern, and for a layer
    without norms and MLP the branch that was added to the skip."""
    rules = PerturbedPlain(net.arch, settings, copies=copies) if copies else Plain(net.arch, settings)
    before, valid, weight = first.tokens(), first.valid.mask, net.arch.attention_skip
    for block in net.blocks:
        at_layer(block.index)
        after, P, *_ = traverse(block, rules, before)
        p = P.mean(-2)
        deviations = Scaled.plain(P - p[:, :, None])
        top = p.argmax(-1, keepdim=True)
        visible = torch.ones(len(P), 1, *P.shape[-2:], dtype=torch.bool, device=P.device)
        state, added = State.of(after, valid), State.of(after - weight * before, valid)
        half = HalfRecord(State.of(before, valid), (), weight, added, state, state)
        yield BlockRecord(state, _PatternMatrix(p, deviations, top, visible), None, (half,))
        before = after


class _PatternMatrix(DeviationPattern):
    """An attention pattern kept as a matrix, whose rows need not sum to one."""

    @cached_property
    def Delta(self) -> Scaled:
        return self.off_top

    @cached_property
    def _matrix(self) -> Tensor:
        return self.p[:, :, None] + self.off_top.value


def agreement(
    before: State, passes: Sequence[State], of_patterns: tuple[Tensor, Tensor], by_float64: FollowedStates | None = None
) -> Agreement[PerSample]:
    """The agreement on the tokens after a layer.

    Args:
        before: The tokens before the layer.
        passes: The tokens after it, of the pass itself and of each copy.
        of_patterns: The `pattern_agreement` of the layer.
        by_float64: The tokens after it beside those of float64, if that sees any.
    """
    first, *copies = passes
    difference = float64_difference = torch.zeros_like(first.log)
    for copy in copies:
        difference = torch.maximum(difference, state_distance(first, copy))
    if by_float64 is not None:
        float64_difference = state_distance(by_float64.state, by_float64.float64)
        float64_difference = float64_difference.masked_fill(~by_float64.followed, 0.0)
    return Agreement(difference, float64_difference, tokens_lost(before, first), *of_patterns)


def pattern_agreement(patterns: Sequence[DeviationPattern]) -> tuple[Tensor, Tensor]:
    """(`undecided`, `elsewhere`) of an `Agreement`, from the attention pattern of the pass itself and of each copy."""
    first, *copies = patterns
    # Two tensors, so that layers with steep scores and without have one form and are read together.
    differ, attend = torch.zeros(2, len(first.p), dtype=torch.bool, device=first.p.device).unbind()
    if copies and must_compute("agreement.steep", steep_scores(first).any()):
        for copy in copies:
            differ, attend = differ | undecided(first, copy), attend | attends_elsewhere(first, copy)
    return differ, attend

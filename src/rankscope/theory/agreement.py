"""How far passes over the same samples agree, layer by layer: the pass itself, its perturbed copies, and float64.

Called by `observation.py`; what is made of the numbers is in `rounding.py`. `Float64Pass` follows the pass in deviation
arithmetic, with which it shares no formula. `float64_records` stands in its place for networks without deviation rules.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, NamedTuple

import torch
from torch import Tensor

from rankscope.deviation import (
    BlockRecord,
    DeviationPattern,
    HalfRecord,
    Scaled,
    State,
    at_layer,
    can_skip,
    must_compute,
)
from rankscope.deviation.comparison import attends_elsewhere, state_distance, steep_scores, tokens_lost, undecided
from rankscope.deviation.perturbation import PerturbedPlain
from rankscope.nets import Block, PassSettings, Plain, Transformer, traverse
from rankscope.theory.facts import Number, PerSample

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

    def matrix(self) -> Tensor:
        return self.p[:, :, None] + self.off_top.value


@dataclass(frozen=True)
class Agreement(Generic[Number]):
    """How far perturbed copies and float64 agree with the pass itself on the tokens after a layer."""

    difference: Number  # Of the copies' tokens, the largest, as `state_distance` has it
    float64_difference: Number
    """How far float64's deviation is from this one, as a share of it, where float64 can see."""
    lost: Number  # Whether a token that was not zero before the layer is too short after it
    undecided: Number  # Whether a copy disagrees on the order of steep scores
    elsewhere: Number  # Whether a copy attends to other tokens by steep scores


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
            differ, attend = differ | undecided(first, copy), attend | attends_elsewhere(first, copy.matrix())
    return differ, attend

"""Passes in float64: beside deviation arithmetic, to check it, and in its place for networks without deviation rules.

Called by `observation.py`. `Float64Pass` follows the pass in deviation arithmetic, with which it shares no formula.
`float64_records` gives the records of blocks that `deviation/dissect.py` gives elsewhere.
"""

import math
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

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
from rankscope.deviation.perturbation import PerturbedPlain
from rankscope.nets import Block, PassSettings, Plain, Transformer, traverse

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

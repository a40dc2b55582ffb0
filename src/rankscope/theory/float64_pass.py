"""Passes in plain float64: beside deviation arithmetic to check it, and in its place where it has no rule.

Called by `observation.py`.
"""

import math
from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from rankscope.deviation import BlockRecord, HalfRecord, Scaled, State
from rankscope.deviation.attention import DeviationPattern
from rankscope.deviation.comparison import state_distance
from rankscope.deviation.perturbation import PerturbedPlain
from rankscope.deviation.second_pass import RESOLVED, WITHIN
from rankscope.nets import Transformer
from rankscope.nets.pass_settings import PassSettings
from rankscope.nets.plain import Plain
from rankscope.nets.traversal import Block, traverse


class Float64Pass:
    """A float64 pass beside deviation arithmetic, with which it shares no formula. The pass restarts from the
    deviation state wherever float64 could not resolve the residual."""

    def __init__(self, net: Transformer, settings: PassSettings) -> None:
        self.rules = Plain(net.arch, settings)
        self.X: Tensor | None = None

    def follow(self, block: Block, before: State, after: State) -> float:
        """The relative difference between the deviation after a block and float64's; 0 where float64 cannot
        resolve it. The float64 tokens are asked as well: those of deviation arithmetic may be wrong."""
        self.X, start = None, self.X
        if not visible_to_float64(before):
            return 0.0
        X = traverse(block, self.rules, before.tokens() if start is None else start).state
        if not bool(X.isfinite().all()):
            return 0.0
        own_state = State.of(X, after.valid.mask)
        if not (visible_to_float64(own_state) or visible_to_float64(after)):
            return 0.0
        self.X = X
        return float(state_distance(after, own_state)[0])


def visible_to_float64(state: State) -> bool:
    """True if float64 can hold the tokens of a state and resolve what they differ by."""
    share, size = float((state.R.log_size() - state.log)[0]), float(state.log[0])
    return share > math.log(RESOLVED) and abs(size) < WITHIN


def float64_records(
    net: Transformer, first: State, settings: PassSettings, seed: int | None
) -> Iterator[BlockRecord]:
    """Run the network in float64 and give a record of each block: its attention pattern, and for a layer
    without norms and MLP the branch that was added to the skip."""
    rules = Plain(net.arch, settings) if seed is None else PerturbedPlain(net.arch, settings, seed)
    before, real, weight = first.tokens(), first.valid.mask, net.arch.attention_skip
    for block in net.blocks:
        after, P, *_ = traverse(block, rules, before)
        p = P.mean(-2)
        deviations = Scaled.plain(P - p[:, :, None])
        top = p.argmax(-1, keepdim=True)
        visible = torch.ones(1, 1, *P.shape[-2:], dtype=torch.bool, device=P.device)
        state, added = State.of(after, real), State.of(after - weight * before, real)
        half = HalfRecord(State.of(before, real), (), weight, added, state, state)
        yield BlockRecord(state, _PatternMatrix(p, deviations, top, visible), None, (half,))
        before = after


class _PatternMatrix(DeviationPattern):
    """An attention pattern kept as a matrix, whose rows need not sum to one."""

    @cached_property
    def Delta(self) -> Scaled:
        return self.others

    def matrix(self) -> Tensor:
        return self.p[:, :, None] + self.others.value

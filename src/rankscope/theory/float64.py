"""What float64 has to say: beside deviation arithmetic where it can see, and in its place without a rule."""

import math
from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from rankscope.deviation import BlockRecord, HalfRecord, Scaled, State
from rankscope.deviation.attention import DeviationPattern
from rankscope.deviation.perturbation import PerturbedPlain
from rankscope.deviation.second_pass import RESOLVED, WITHIN, distance
from rankscope.nets import Transformer
from rankscope.nets.pass_settings import PassSettings
from rankscope.nets.plain import Plain
from rankscope.nets.traversal import Block, traverse


class Float64:
    """The plain rules beside deviation arithmetic, with which they share no formula, from where float64 last
    could not see."""

    def __init__(self, net: Transformer, settings: PassSettings) -> None:
        self.rules = Plain(net.arch, settings)
        self.X: Tensor | None = None

    def follow(self, block: Block, before: State, after: State) -> float:
        """How far the deviation after a block is from float64's, as a share; 0 where float64 cannot see. Its
        own tokens tell that as well: those of deviation arithmetic may have been lost."""
        self.X, start = None, self.X
        if not visible_to_float64(before):
            return 0.0
        X = traverse(block, self.rules, before.tokens() if start is None else start).state
        if not bool(X.isfinite().all()):
            return 0.0
        own = State.of(X, after.valid.mask)
        if not (visible_to_float64(own) or visible_to_float64(after)):
            return 0.0
        self.X = X
        return float(distance(after, own)[0])


def visible_to_float64(state: State) -> bool:
    """Its numbers are within float64's range, and what they differ by is not lost beside their size."""
    share, size = float((state.R.log_size() - state.log)[0]), float(state.log[0])
    return share > math.log(RESOLVED) and abs(size) < WITHIN


def plainly(
    net: Transformer, first: State, settings: PassSettings, seed: int | None
) -> Iterator[BlockRecord]:
    """The pass in float64, with what can be had of each block without a rule: its attention, and of a layer
    without norms and MLP what was added to the skip."""
    rules = Plain(net.arch, settings) if seed is None else PerturbedPlain(net.arch, settings, seed)
    before, real, weight = first.tokens(), first.valid.mask, net.arch.attention_skip
    for block in net.blocks:
        after, P, *_ = traverse(block, rules, before)
        p = P.mean(-2)
        others = Scaled.plain(P - p[:, :, None])
        top = p.argmax(-1, keepdim=True)
        visible = torch.ones(1, 1, *P.shape[-2:], dtype=torch.bool)
        state, added = State.of(after, real), State.of(after - weight * before, real)
        half = HalfRecord(State.of(before, real), (), weight, added, state, state)
        yield BlockRecord(state, _Given(p, others, top, visible), None, (half,))
        before = after


class _Given(DeviationPattern):
    """Attention as a matrix: rows need not sum to one."""

    @cached_property
    def Delta(self) -> Scaled:
        return self.others

    def matrix(self) -> Tensor:
        return self.p[:, :, None] + self.others.value

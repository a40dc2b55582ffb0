"""A pass in deviation arithmetic with all that happened inside each block: what the theorems ask about."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rankscope.deviation.attention import DeviationPattern, HeadOutputs, Values
from rankscope.deviation.perturbation import Perturbation, PerturbedDeviation
from rankscope.deviation.rules import Deviation, total
from rankscope.deviation.state import State
from rankscope.nets.order import Branching, Half
from rankscope.nets.pass_settings import PassSettings
from rankscope.nets.transformer import Transformer
from rankscope.nets.traversal import Block, traverse


class BranchRecord(NamedTuple):
    """Attention or the MLP on its way from the tokens to the sum."""

    kind: Branching
    inside: State
    """What it reads: the tokens, through a norm where one comes before."""
    raw: State
    """What it says."""
    out: State
    """The same, through the second norm of a sandwich where there is one."""


class HalfRecord(NamedTuple):
    """A skip and what is added to it: attention, the MLP, or in a parallel block both."""

    before: State
    branches: tuple[BranchRecord, ...]
    weight: float
    """Of the skip."""
    total: State
    """All that is added to the skip."""
    summed: State
    after: State
    """The sum, through the norm of a post-norm block."""
    torn: bool = False
    """Whether a norm gave a sign to a token that is zero but for rounding, in this block or before."""


class BlockRecord(NamedTuple):
    """What a block did to a state, and how."""

    state: State
    attention: DeviationPattern
    heads: HeadOutputs | None
    halves: tuple[HalfRecord, ...]


class _Noting:
    """Notes what goes into and comes out of every part."""

    def forget(self) -> None:
        """Before each block."""
        self.inside: dict[str, State] = {}
        self.said: dict[str, State] = {}
        self.normed: dict[str, State] = {}
        self.sums: list[tuple[Half, State, dict[str, State], State]] = []

    def norm(self, block: Block, name: str, state: State) -> State:
        found: State = super().norm(block, name, state)
        self.normed[name] = found
        return found

    def values(self, block: Block, state: State) -> Values:
        self.inside["attention"] = state
        found: Values = super().values(block, state)
        return found

    def output(self, block: Block, spoken: HeadOutputs) -> State:
        found: State = super().output(block, spoken)
        self.said["attention"] = found
        return found

    def mlp(self, block: Block, state: State) -> State:
        self.inside["mlp"] = state
        found: State = super().mlp(block, state)
        self.said["mlp"] = found
        return found

    def add(self, block: Block, half: Half, state: State, branches: dict[str, State]) -> State:
        found: State = super().add(block, half, state, branches)
        self.sums.append((half, state, branches, found))
        return found

    def torn(self) -> bool:
        """Asked of what is shaken."""
        return False

    def halves(self) -> tuple[HalfRecord, ...]:
        """What was noted of one block."""
        found = []
        for half, before, out, summed in self.sums:
            branches = tuple(
                BranchRecord(each.part, self.inside[each.part], self.said[each.part], out[each.part])
                for each in half.branches
            )
            after = summed if half.after is None else self.normed[half.after]
            said = total(out.values())
            found.append(HalfRecord(before, branches, half.skip, said, summed, after, self.torn()))
        return tuple(found)


class _Noted(_Noting, Deviation):
    """Deviation arithmetic that notes."""


class _NotedShaken(_Noting, PerturbedDeviation):
    """The same, shaken."""

    def torn(self) -> bool:
        return bool(self.signs.torn)


def started(net: Transformer, X: Tensor, seed: int | None = None) -> tuple[State, PassSettings]:
    """The state and settings that a pass over tokens without padding starts from; with a seed, perturbed
    (`perturbation.py`), since the split into a common token and deviations rounds as any rule does."""
    X, valid, _ = net.prepared(X.to(dtype=torch.float64, device=net.device), None)
    settings = net.settings(X, valid)
    if seed is None:
        return State.of(X, valid), settings
    noise = Perturbation(seed)
    X = X if net.weights.positions is None else noise.perturb(X)  # a sum, which was rounded
    return noise.of(State.of(X, valid)), settings


def dissect(net: Transformer, X: Tensor, seed: int | None = None) -> Iterator[BlockRecord]:
    """The pass over tokens without padding, at least one, block by block with its parts; with a seed, by
    rules that are shaken."""
    net = net.to(torch.float64)
    state, settings = started(net, X, seed)
    rules = _Noted(net.arch, settings) if seed is None else _NotedShaken(net.arch, settings, seed)
    for block in net.blocks:
        rules.forget()
        state, P, heads, *_ = traverse(block, rules, state)
        yield BlockRecord(state, P, heads, rules.halves())

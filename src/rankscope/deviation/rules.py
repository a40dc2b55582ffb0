"""The rules of deviation arithmetic: what each part of a block does to a state `1 x^T + e^s R`."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import Tensor

from rankscope.deviation.attention import (
    DeviationPattern,
    HeadOutputs,
    Mixable,
    Values,
    deviations,
    heads,
    mixed,
)
from rankscope.deviation.experts import mixture
from rankscope.deviation.gates import gated
from rankscope.deviation.latents import latent
from rankscope.deviation.mlp import affine, mlp
from rankscope.deviation.norms import normed
from rankscope.deviation.part_operations import PartOperations
from rankscope.deviation.scores import ScoreParts, Scores, prepared
from rankscope.deviation.sinkhorn import balanced
from rankscope.deviation.softmax import split
from rankscope.deviation.state import State
from rankscope.nets.architecture import Architecture
from rankscope.nets.order import Half
from rankscope.nets.pass_settings import PassSettings
from rankscope.nets.traversal import Block
from rankscope.nets.weights import Latent, Linear


class Deviation(PartOperations):
    """Rules on states, and the operations that rules of parts call (`part_operations.py`)."""

    name = "deviation"

    def __init__(self, arch: Architecture, settings: PassSettings) -> None:
        self.arch, self.settings = arch, settings
        self.memory: dict[str, Any] = {}
        self.routed: dict[int, Tensor] = {}
        self.crossed: dict[int, DeviationPattern] = {}

    def norm(self, block: Block, name: str, state: State) -> State:
        """Each token, normalised (`norms.py`). What a branch adds is not tidy yet."""
        state = self.tidy(state) if name.endswith("_after") else state
        weights, eps = getattr(block.weights, name), self.arch.norm_eps
        return self.tidy(normed(state, self.arch.norm, weights, eps, self.rounding))

    def values(self, block: Block, state: State) -> Values:
        """What heads mix, of the common token and of deviations from it."""
        w = block.weights.attention.value
        state = self.latent(state, block.weights.attention.key_latent, alone=True)
        common, deviation = heads(state.x, w, self.arch), deviations(state.R, w, self.arch)
        return Values(common.by_head(), deviation.by_head(), state.valid)

    def pattern(self, block: Block, state: State) -> DeviationPattern:
        """P as what all rows share and what they do not (`attention.py`)."""
        visible = self.settings.visible[self.arch.mask_of(block.index)]
        visible = visible.expand(len(state.valid.mask), -1, -1, -1)
        found = balanced(self.scores(block, state), visible, state.valid, self.arch.sinkhorn_rounds or 0)
        return split(found, visible, state.valid)

    def scores(self, block: Block, state: State) -> Scores:
        """What all rows of scores share, and what they do not."""
        return self.prepared(block, state).scores()

    def prepared(
        self, block: Block, state: State, bias: Callable[[slice], Tensor] | None = None
    ) -> ScoreParts:
        """What they are made of; `bias` makes rows of what positions add, where the settings have not all."""
        w = block.weights.attention
        asking, keys = self.latent(state, w.query_latent), self.latent(state, w.key_latent)
        touched = (self.touch, self.rounding)
        return prepared(self.arch, block.index, w, asking, self.settings, *touched, keys, bias)

    def latent(self, state: State, w: Latent | None, *, alone: bool = False) -> State:
        """What queries, or keys and values, are linear in (`latents.py`)."""
        return latent(state, w, self.touch, self.tidy, self.rounding, alone=alone)

    def mix(self, block: Block, P: Mixable, values: Values) -> HeadOutputs:
        """What each head says."""
        return mixed(self.arch, self.active_heads(block), block.weights.attention.output.weight, P, values)

    def gate(self, block: Block, spoken: HeadOutputs, state: State) -> HeadOutputs:
        """What each head says, times its gate (`gates.py`)."""
        w = block.weights.attention.gate
        assert w is not None
        z, d = self.touch(heads(state.x, w, self.arch)), self.touch(deviations(state.R, w, self.arch))
        return gated(spoken, z, d)

    def output(self, block: Block, spoken: HeadOutputs) -> State:
        """What heads add: their common values and deviations through the output projection."""
        w = block.weights.attention.output
        out = Linear(w.weight.flatten(0, 1), w.bias)
        return State(
            affine(spoken.x.together().mapped(lambda t: t.flatten(1)), out),
            spoken.R.together().mapped(lambda t: t.transpose(1, 2).flatten(-2) @ out.weight),
            spoken.valid,
        )

    def cross(self, block: Block, state: State) -> State:
        """What cross-attention adds: the values are the memory's, a common one and deviations as tokens have
        them, and rows of P differ by what queries differ by."""
        there = block.crossing
        P = self.crossed[block.index] = self.cross_pattern(there, state)
        values = replace(self.values(there, self.source), valid=state.valid)
        return self.output(there, self.mix(there, P, values))

    def cross_pattern(self, there: Block, state: State) -> DeviationPattern:
        """P of the tokens on the memory."""
        assert self.settings.memory is not None
        visible = self.settings.memory.visible(state.valid.mask)
        return split(self.cross_scores(there, state), visible, state.valid, tokens=False)

    def cross_scores(self, there: Block, state: State) -> Scores:
        """What all rows of scores share, and what they do not, of tokens asking the memory."""
        return self.cross_prepared(there, state).scores()

    def cross_prepared(self, there: Block, state: State) -> ScoreParts:
        """What these are made of."""
        w, settings = there.weights.attention, self.settings.bare()
        return prepared(self.arch, there.index, w, state, settings, self.touch, self.rounding, self.source)

    @cached_property
    def source(self) -> State:
        """The memory, in two parts as tokens are."""
        assert self.settings.memory is not None
        return State.of(self.settings.memory.tokens, self.settings.memory.valid)

    def mlp(self, block: Block, state: State) -> State:
        """What the MLP adds (`mlp.py`), or a mixture of experts (`experts.py`)."""
        if block.weights.experts is not None:
            out, self.routed[block.index] = mixture(self.arch, block.weights.experts, state, self.touch)
            return out
        assert block.weights.mlp is not None
        return mlp(self.arch, block.weights.mlp, state, self.touch)

    def add(self, block: Block, half: Half, state: State, branches: dict[str, State]) -> State:
        """`skip X + branches`, each part at the larger of its two scales."""
        branch = total(branches.values())
        return self.tidy(branch if half.skip == 0.0 else added(half.skip, state, branch))


def total(branches: Iterable[State]) -> State:
    """What several branches add together."""
    whole, *others = branches
    for other in others:
        whole = added(1.0, other, whole)
    return whole


def added(weight: float, state: State, branch: State) -> State:
    """`weight X + branch`, not yet tidy."""
    return State(state.x * weight + branch.x, state.R * weight + branch.R, state.valid)

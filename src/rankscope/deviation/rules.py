"""The rules of deviation arithmetic: what each part of a block does to a state `1 x^T + e^s R`.

`nets/traversal.py` walks through a block and calls the methods of `Deviation` in the block's order: for the
attention branch `norm` (of a pre-norm block), `values`, `pattern`, `mix`, `gate` (if heads have gates),
`output`; for the MLP branch `norm`, `mlp`; for cross-attention `norm`, `cross`; after each branch `norm` (of
a sandwich); then `add` the skip, and `norm` (of a post-norm block). `part` is called wherever a part of the
user's own stands. Each method hands over to the file with its formulas:

    norm -> norms.py        values, mix -> attention.py     pattern -> scores.py, softmax.py
    gate -> attention.py    mlp -> mlp.py, experts.py       add -> state.py (tidy)

Traversals are started by `propagate.py`, `replay.py`, `second_pass.py` and `dissect.py`.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rankscope.deviation import attention
from rankscope.deviation.attention import DeviationPattern, HeadOutputs, Mixable, Values, common_heads, deviation_heads
from rankscope.deviation.experts import mixture
from rankscope.deviation.mlp import affine, mlp
from rankscope.deviation.norms import normed
from rankscope.deviation.part_operations import PartOperations
from rankscope.deviation.scaled import Scaled
from rankscope.deviation.scores import ScoreParts, Scores, StateHeads
from rankscope.deviation.softmax import balanced, split
from rankscope.deviation.state import State
from rankscope.nets import LATENT_EPS, Architecture, Block, Half, Latent, Linear, PassSettings


class Deviation(PartOperations):
    """The deviation arithmetic: a rule on states for every part of a block, and the operations that rules of
    parts and remedies call (`part_operations.py`)."""

    name = "deviation"

    def __init__(self, arch: Architecture, settings: PassSettings) -> None:
        self.arch, self.settings = arch, settings
        self.carried: dict[str, Any] = {}
        self.routed: dict[int, Tensor] = {}
        self.cross_patterns: dict[int, DeviationPattern] = {}

    def norm(self, block: Block, name: str, state: State) -> State:
        """The state with each token normalised (`norms.py`). The output of a branch is made tidy first."""
        state = self.tidy(state) if name.endswith("_after") else state
        weights, eps = getattr(block.weights, name), self.arch.norm_eps
        return self.tidy(normed(state, self.arch.norm, weights, eps, self.perturb_tensor))

    def values(self, block: Block, state: State) -> Values:
        """The values of all heads: those of the common token, and deviations from them."""
        w = block.weights.attention.value
        state = self.latent(state, block.weights.attention.key_latent, alone=True)
        common, deviation = common_heads(state.x, w, self.arch), deviation_heads(state.R, w, self.arch)
        return Values(common.by_head(), deviation.by_head(), state.valid)

    def pattern(self, block: Block, state: State) -> DeviationPattern:
        """The attention pattern P as one row p and what the rows differ from it by (`softmax.py`)."""
        visible = self.settings.visible[self.arch.mask_of(block.index)]
        visible = visible.expand(len(state.valid.mask), -1, -1, -1)
        parts = self.score_parts(block, state)
        scores = balanced(self.scores(parts), visible, state.valid, self.arch.sinkhorn_rounds or 0)
        return replace(split(scores, visible, state.valid), before_cap=parts.before_cap())

    def scores(self, parts: ScoreParts) -> Scores:
        """Scores as a row `ref` shared by all queries and the rest D."""
        return parts.scores()

    def score_parts(
        self, block: Block, state: State, bias: Callable[[slice], Tensor] | None = None, source: State | None = None
    ) -> ScoreParts:
        """The queries, keys and positions that the scores are made of (`scores.py`); `bias` makes rows of what
        positions add, if the settings do not hold all of it. Keys are of the `source`, a memory, or of the tokens."""
        w = block.weights.attention
        if source is None:
            queries, keys, settings = (
                self.latent(state, w.query_latent),
                self.latent(state, w.key_latent),
                self.settings,
            )
        else:
            queries, keys, settings = state, source, self.settings.bare()
        perturbations = (self.perturb, self.perturb_tensor)
        return StateHeads(self.arch, block.index, w, queries, settings, *perturbations, keys, bias).parts()

    def latent(self, state: State, w: Latent | None, *, alone: bool = False) -> State:
        """The state that queries, or keys and values, are linear in, where attention has latents: the latent
        `RMSNorm(x A)`, and beside it what goes without a norm, unless the latent is asked for `alone`."""
        if w is None:
            return state
        assert w.norm.gain is not None
        width, valid = len(w.norm.gain), state.valid
        x = self.perturb(affine(state.x, Linear(w.weight, w.bias)))
        R = self.perturb(state.R.mapped(lambda t: t @ w.weight))
        normed_part, rest = (
            self.tidy(State(x.mapped(lambda t, at=at: t[..., at]), R.mapped(lambda t, at=at: t[..., at]), valid))
            for at in (slice(width), slice(width, None))
        )
        normed_part = self.tidy(normed(normed_part, "rms", w.norm, LATENT_EPS, self.perturb_tensor))
        if alone or width == w.weight.shape[1]:
            return normed_part
        return State(_concatenated(normed_part.x, rest.x), _concatenated(normed_part.R, rest.R), valid)

    def mix(self, block: Block, P: Mixable, values: Values) -> HeadOutputs:
        """The outputs of the heads, pattern times values (`attention.py`)."""
        return attention.mixed(self.arch, self.active_heads(block), block.weights.attention.output.weight, P, values)

    def gate(self, block: Block, heads: HeadOutputs, state: State) -> HeadOutputs:
        """The outputs of the heads times their gates (`attention.py`)."""
        w = block.weights.attention.gate
        assert w is not None
        z = self.perturb(common_heads(state.x, w, self.arch))
        d = self.perturb(deviation_heads(state.R, w, self.arch))
        return attention.gated(heads, z, d)

    def output(self, block: Block, heads: HeadOutputs) -> State:
        """The attention branch: the outputs of the heads through the output projection."""
        w = block.weights.attention.output
        out = Linear(w.weight.flatten(0, 1), w.bias)
        x = affine(heads.x.together().mapped(lambda t: t.flatten(1)), out)
        R = heads.R.side_by_side().mapped(lambda t: t @ out.weight)
        return State(x, R, heads.valid)

    def cross(self, block: Block, state: State) -> State:
        """The cross-attention branch: values are the memory's, and rows differ as the tokens' queries do."""
        cross_block = block.cross_block
        P = self.cross_patterns[block.index] = self.cross_pattern(cross_block, state)
        values = replace(self.values(cross_block, self.source), valid=state.valid)
        return self.output(cross_block, self.mix(cross_block, P, values))

    def cross_pattern(self, cross_block: Block, state: State) -> DeviationPattern:
        """The pattern of the tokens' attention to the memory."""
        assert self.settings.memory is not None
        visible = self.settings.memory.visible(state.valid.mask)
        parts = self.score_parts(cross_block, state, source=self.source)
        return replace(split(self.scores(parts), visible, state.valid, tokens=False), before_cap=parts.before_cap())

    @cached_property
    def source(self) -> State:
        """The memory as a state."""
        assert self.settings.memory is not None
        return State.of(self.settings.memory.tokens, self.settings.memory.valid)

    def mlp(self, block: Block, state: State) -> State:
        """The MLP branch (`mlp.py`), or that of a mixture of experts (`experts.py`)."""
        if block.weights.experts is not None:
            out, self.routed[block.index] = mixture(self.arch, block.weights.experts, state, self.perturb)
            return out
        assert block.weights.mlp is not None
        return mlp(self.arch, block.weights.mlp, state, self.perturb)

    def add(self, block: Block, half: Half, state: State, branches: dict[str, State]) -> State:
        """The sum `skip X + branches`, each part at the larger of its two scales, and tidy."""
        branch = total(branches.values())
        return self.tidy(branch if half.skip == 0.0 else added(half.skip, state, branch))


def total(branches: Iterable[State]) -> State:
    """The sum of several branches, not yet tidy."""
    result, *remaining = branches
    for branch in remaining:
        result = added(1.0, branch, result)
    return result


def added(weight: float, state: State, branch: State) -> State:
    """The sum `weight X + branch` of two states, not yet tidy."""
    return State(state.x * weight + branch.x, state.R * weight + branch.R, state.valid)


def _concatenated(a: Scaled, b: Scaled) -> Scaled:
    """Entries of a, then those of b, at the larger of their scales; zeros do not set the scale."""
    wide, narrow = torch.zeros_like(b.value), torch.zeros_like(a.value)
    return a.mapped(lambda t: torch.cat([t, wide], -1)) + b.mapped(lambda t: torch.cat([narrow, t], -1))

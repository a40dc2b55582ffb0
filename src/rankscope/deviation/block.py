"""One block of a state: the mirror of `nets/block.py`, rule by rule."""

from typing import Literal, NamedTuple

import torch

from rankscope.deviation.attention import Attention, Spoken, attention
from rankscope.deviation.mlp import mlp
from rankscope.deviation.norms import normalise
from rankscope.deviation.state import State, doubtful
from rankscope.nets.architecture import Architecture
from rankscope.nets.block import Setting
from rankscope.nets.weights import Layer, NormWeights


class Branch(NamedTuple):
    """Attention or the MLP on its way from the tokens to the sum."""

    kind: Literal["attention", "mlp"]
    inside: State
    """What it reads: the tokens, through a norm where one comes before."""
    raw: State
    """What it says."""
    out: State
    """The same, through the second norm of a sandwich where there is one."""


class Half(NamedTuple):
    """A skip and what is added to it: attention, the MLP, or in a parallel block both."""

    before: State
    branches: tuple[Branch, ...]
    weight: float
    """Of the skip."""
    total: State
    """All that is added to the skip."""
    summed: State
    after: State
    """The sum, through the norm of a post-norm block."""


class Block(NamedTuple):
    """What a block does to a state, and how."""

    state: State
    attention: Attention
    heads: Spoken
    halves: tuple[Half, ...]


def block(arch: Architecture, index: int, layer: Layer, state: State, setting: Setting) -> Block:
    """The state after layer `index`, its attention, what its heads say, and the way through its parts."""
    inside = state if index in arch.bare_layers else _before(arch, layer.attention_norm, state)
    raw, P, spoken = attention(arch, index, layer, inside, setting)
    branches = [Branch("attention", inside, raw, _after(arch, layer.attention_after, raw))]
    has_mlp = arch.mlp != "none"
    if has_mlp and arch.parallel:
        branches.append(_mlp(arch, layer, state))
    halves = [_half(arch, arch.attention_skip, layer.attention_norm, state, branches)]
    if has_mlp and not arch.parallel:
        state = halves[0].after
        halves.append(_half(arch, arch.mlp_skip, layer.mlp_norm, state, [_mlp(arch, layer, state)]))
    return Block(halves[-1].after, P, spoken, tuple(halves))


def _mlp(arch: Architecture, layer: Layer, state: State) -> Branch:
    inside = _before(arch, layer.mlp_norm, state)
    raw = mlp(arch, layer, inside)
    return Branch("mlp", inside, raw, _after(arch, layer.mlp_after, raw))


def _half(arch: Architecture, weight: float, norm: NormWeights, state: State, branches: list[Branch]) -> Half:
    total = branches[0].out
    for other in branches[1:]:
        total = added(1.0, other.out, total)
    summed = skip(weight, state, total)
    after = _norm(arch, norm, summed) if arch.norm_place == "post" else summed
    return Half(state, tuple(branches), weight, total, summed, after)


def skip(weight: float, state: State, branch: State) -> State:
    """`weight X + branch`, each part at the larger of its two scales."""
    if weight == 0.0:
        return branch.tidy()
    return added(weight, state, branch).tidy()


def added(weight: float, state: State, branch: State) -> State:
    """`weight X + branch`, not yet tidy; the larger noise of the two stays."""
    R = state.R * weight + branch.R
    one, other = (state.R * weight).log_size(), branch.R.log_size()
    larger, size = torch.where(one > other, state.doubt, branch.doubt), torch.maximum(one, other)
    return State(state.x * weight + branch.x, R, state.real, doubtful(larger, size, R.log_size()))


def _norm(arch: Architecture, weights: NormWeights, state: State) -> State:
    return normalise(state, arch.norm, weights, arch.norm_eps)


def _before(arch: Architecture, weights: NormWeights, state: State) -> State:
    return state if arch.norm_place == "post" else _norm(arch, weights, state)


def _after(arch: Architecture, weights: NormWeights, branch: State) -> State:
    return _norm(arch, weights, branch.tidy()) if arch.norm_place == "sandwich" else branch

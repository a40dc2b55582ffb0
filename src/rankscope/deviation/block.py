"""One block of a state: the mirror of `nets/block.py`, rule by rule."""

import torch

from rankscope.deviation.attention import Attention, Spoken, attention
from rankscope.deviation.mlp import mlp
from rankscope.deviation.norms import normalise
from rankscope.deviation.state import State, doubtful
from rankscope.nets.architecture import Architecture
from rankscope.nets.block import Setting
from rankscope.nets.weights import Layer, NormWeights


def block(
    arch: Architecture, index: int, layer: Layer, state: State, setting: Setting
) -> tuple[State, Attention, Spoken]:
    """The state after layer `index`, its attention, and what its heads say."""
    norm_a, norm_m = layer.attention_norm, layer.mlp_norm
    post, has_mlp = arch.norm_place == "post", arch.mlp != "none"

    inside = state if index in arch.bare_layers else _before(arch, norm_a, state)
    branch, P, spoken = attention(arch, index, layer, inside, setting)
    branch = _after(arch, layer.attention_after, branch)
    if arch.parallel and has_mlp:
        second = _after(arch, layer.mlp_after, mlp(arch, layer, _before(arch, norm_m, state)))
        branch = added(1.0, second, branch)
    state = skip(arch.attention_skip, state, branch)
    if post:
        state = _norm(arch, norm_a, state)
    if arch.parallel or not has_mlp:
        return state, P, spoken

    branch = _after(arch, layer.mlp_after, mlp(arch, layer, _before(arch, norm_m, state)))
    state = skip(arch.mlp_skip, state, branch)
    return _norm(arch, norm_m, state) if post else state, P, spoken


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

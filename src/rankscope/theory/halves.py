"""What a skip and its branches did to the deviation: gains, alignment, stretches and ranks, measured."""

import math

import torch
from torch import Tensor

from rankscope.deviation import HalfRecord, Scaled, State
from rankscope.deviation.activations import VALUES
from rankscope.deviation.mlp import REACH
from rankscope.nets import Architecture
from rankscope.nets.norms import NormWeights, norm_of
from rankscope.nets.weights import Layer, Linear
from rankscope.shapes import Float
from rankscope.theory.facts import HalfFacts
from rankscope.theory.logs import log, log_of, plus, sized, times
from rankscope.theory.weight_norms import EPS, LIPSCHITZ, TINY, MLPNorms, lost

VANISHED = 1e-11  # A token this much shorter than the longest may be what rounding left of zero
CLEAR = 1e-6
"""What a norm finds counts as rank above this (times the size of the matrix): more than rounding may be of it
before it is marked. What it leaves counts above rounding, and is plain where nothing lies between."""


def half_facts(arch: Architecture, layer: Layer, half: HalfRecord, averaging: float, mlp: MLPNorms) -> HalfFacts:
    """The facts of one half of a block (a skip and its branches); `averaging` is the log of the factor by which
    attention shrinks distances, `mlp` the MLP's constants."""
    R, F = sized(half.before.centred()[1]), sized(half.total.centred()[1])
    alignment, square = 0.0, float(R.value.square().sum())
    if square > 0:
        step = math.exp(min(float(F.log[0] - R.log[0]), 600.0))
        alignment = float((R.value * F.value).sum()) / square * step
    all_tokens = sized(Scaled.plain(half.total.tokens(half.total.log)))
    longest = torch.linalg.vector_norm(all_tokens.value[0], dim=-1).max()
    stretches = [log(abs(half.weight))]
    ranks: list[tuple[int, int, int]] = []
    clear, vanished = True, half.torn

    def normed(weights: NormWeights, before: State, after: State) -> float:
        """Note the ranks around a norm, and give its stretch."""
        nonlocal clear, vanished
        known = singular_values(after)
        rank, plain_rank = int((known > EPS).sum()), int((known > CLEAR).sum())
        ranks.append((int((singular_values(before) > CLEAR).sum()), rank, rank_loss(arch, weights)))
        clear = clear and plain_rank == rank
        vanished = vanished or _vanishes(arch, before)
        return norm_stretch(arch, weights, before)

    if not half.branches:  # seen from outside: the whole of it is attention, or nothing is known
        stretches.append(averaging if arch.norm == "none" and arch.mlp == "none" else math.nan)
    for branch in half.branches:
        own_norm = layer.attention_norm if branch.kind == "attention" else layer.mlp_norm
        after = layer.attention_after if branch.kind == "attention" else layer.mlp_after
        stretch = averaging if branch.kind == "attention" else _mlp_stretch(arch, layer, branch.inside, mlp)
        if branch.inside is not half.before:
            stretch = times(stretch, normed(own_norm, half.before, branch.inside))
        if branch.out is not branch.raw:
            raw = branch.raw.tidy()
            stretch = times(stretch, normed(after, raw, branch.out))
            if branch.kind == "attention":
                w = layer.attention
                most = w.value.weight.norm() * w.output.weight.norm() * branch.inside.scaled_tokens[0].norm()
                vanished = vanished or _vanishes(arch, raw, log(float(most)) + float(branch.inside.log[0]))
        stretches.append(stretch)
    stretch, log_norm = plus(*stretches), 0.0
    if half.after is not half.summed:
        log_norm = _ratio(half.after, half.summed)
        own_norm = layer.attention_norm if half.branches[0].kind == "attention" else layer.mlp_norm
        stretch = times(stretch, normed(own_norm, half.summed, half.after))
    return HalfFacts(
        half.weight, _ratio(half.total, half.before), alignment, log_norm,
        log_of(longest, all_tokens.log[0] + half.total.log[0]), F, stretch,
        tuple(ranks), clear, vanished,
    )  # fmt: skip


def _vanishes(arch: Architecture, state: State, beside: float | None = None) -> bool:
    """Whether a norm, whose eps does not hide it, meets a token that is zero but for rounding beside another,
    or beside the log of what it is the sum of: what it makes of one is a direction of full length or none,
    and with few entries passes that round otherwise may agree on it by chance."""
    norm, all_tokens = norm_of(arch.norm), state.scaled_tokens[0]
    lengths = torch.linalg.vector_norm(all_tokens if norm is None else norm.centre(all_tokens), dim=-1)
    if beside is None:
        beside = log(float(torch.linalg.vector_norm(all_tokens, dim=-1).max())) + float(state.log[0])
    least = log(VANISHED) + beside
    return log(float(lengths.min())) + float(state.log[0]) <= least and log(arch.norm_eps) < 2 * least


def _ratio(state: State, other: State) -> float:
    """log of `mu(state) / mu(other)`; zero over zero is zero."""
    residuals = [sized(tokens.centred()[1]) for tokens in (state, other)]
    above, below = (log_of(R.value.norm(), R.log[0]) for R in residuals)
    return -math.inf if above == -math.inf else above - below


def rank_loss(arch: Architecture, weights: NormWeights) -> int:
    """The most that a norm can take from the affine rank; gains that `CLEAR` cannot see count as zero."""
    gain = weights.gain
    gone = 0 if gain is None else int((gain.abs() <= 1e-5 * gain.abs().max()).sum())
    norm = norm_of(arch.norm)
    return (2 if norm is not None and norm.centred else 1) + gone


def norm_stretch(arch: Architecture, weights: NormWeights, state: State) -> float:
    """log of `max|gain| / min sd`: no two of these tokens end further apart than so many times their distance
    (`||u/|u| - v/|v||| <= ||u - v|| / sqrt(|u||v|)`, eps being one more coordinate)."""
    norm = norm_of(arch.norm)
    if norm is None:
        return 0.0
    if norm.length is not None:
        return math.inf  # nothing is known of a length of one's own
    Y = norm.centre(state.scaled_tokens[0])
    entries = Y.shape[-1] if norm.averaged else 1
    least = float(torch.linalg.vector_norm(Y, dim=-1).min())
    sd = plus(2 * (log(least) + float(state.log[0])) - log(entries), log(arch.norm_eps)) / 2
    gain = 1.0 if weights.gain is None else float(weights.gain.abs().max())
    return math.inf if sd == -math.inf else log(gain) - sd


def _mlp_stretch(arch: Architecture, layer: Layer, state: State, norms: MLPNorms) -> float:
    """log of the Lipschitz constant in the 2-norm; of a gated MLP, on these tokens."""
    w = layer.mlp
    if w is None:
        return math.inf  # of a mixture of experts: tokens that choose others may end anywhere
    if w.gate is None:
        return log(norms.spectral)
    if float(torch.maximum(state.x.log_size(), state.R.log_size())[0]) > REACH:
        return math.inf  # beyond what ordinary tokens can hold: no factor, not a small one
    X, slope = state.tokens()[0], LIPSCHITZ[arch.activation]
    (up, up_off), (gate, gate_off) = _projected(X, w.up), _projected(X, w.gate)
    # An activation that is all but closed here, or underflows, may be open by as much as its gate is off.
    opened = float((VALUES[arch.activation](gate).abs() + slope * gate_off).max()) + TINY
    steepest = slope * float((up.abs() + up_off).max())
    return log(norms.down * (opened * norms.up + steepest * norms.gate))


def _projected(X: Tensor, linear: Linear) -> tuple[Tensor, Tensor]:
    """(`X W + b`, the most that rounding may have moved each entry by)."""
    b = torch.zeros_like(linear.weight[0]) if linear.bias is None else linear.bias
    off = lost(*linear.weight.shape) * (X.abs() @ linear.weight.abs() + b.abs())
    return X @ linear.weight + b, off


def singular_values(state: State) -> Float[Tensor, " rank"]:
    """Singular values of the tokens' deviation, divided by the largest and by the size of the matrix: those
    above eps count for the rank."""
    R = sized(state.centred()[1]).value[0]
    s = torch.linalg.svdvals(R)[: max(len(R) - 1, 0)]  # the last is zero, since rows sum to zero
    largest = s.max().clamp(min=TINY) if len(s) else s.new_ones(())
    return s / largest / max(R.shape)

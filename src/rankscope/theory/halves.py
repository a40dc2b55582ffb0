"""What a skip and its branches did to the deviation: gains, alignment, stretches and ranks, measured."""

import math

import torch

from rankscope.deviation import HalfTaken, Scaled, State
from rankscope.deviation.mlp import REACH
from rankscope.metrics import numerical_rank
from rankscope.nets import Architecture
from rankscope.nets.activations import ACTIVATIONS
from rankscope.nets.norms import NormWeights, norm_of
from rankscope.nets.weights import Layer
from rankscope.theory.constants import LIPSCHITZ, MLPNorms, spectral_norm
from rankscope.theory.facts import HalfFacts
from rankscope.theory.logs import log, log_of, plus, sized, times

CLEAR = 1e-9
"""What a norm finds counts as rank above this (times the size of the matrix); what it leaves, above rounding:
dividing rows by lengths that differ a million times does not then lose any."""


def half_facts(
    arch: Architecture, layer: Layer, half: HalfTaken, averaging: float, mlp: MLPNorms
) -> HalfFacts:
    """Of one half of a block; `averaging` is what attention does to distances, `mlp` the MLP's constants."""
    R, F = sized(half.before.centred()[1]), sized(half.total.centred()[1])
    alignment, square = 0.0, float(R.value.square().sum())
    if square > 0:
        step = math.exp(min(float(F.log[0] - R.log[0]), 600.0))
        alignment = float((R.value * F.value).sum()) / square * step
    whole = sized(Scaled.plain(half.total.tokens(half.total.log)))
    longest = torch.linalg.vector_norm(whole.value[0], dim=-1).max()
    ranks, stretches = [], [log(abs(half.weight))]
    if not half.branches:  # seen from outside: the whole of it is attention, or nothing is known
        stretches.append(averaging if arch.norm == "none" and arch.mlp == "none" else math.nan)
    for branch in half.branches:
        own = layer.attention_norm if branch.kind == "attention" else layer.mlp_norm
        after = layer.attention_after if branch.kind == "attention" else layer.mlp_after
        stretch = averaging if branch.kind == "attention" else _mlp_stretch(arch, layer, branch.inside, mlp)
        if branch.inside is not half.before:
            stretch = times(stretch, norm_stretch(arch, own, half.before))
            ranks.append((rank_of(half.before, CLEAR), rank_of(branch.inside), rank_loss(arch, own)))
        if branch.out is not branch.raw:
            raw = branch.raw.tidy()
            stretch = times(stretch, norm_stretch(arch, after, raw))
            ranks.append((rank_of(raw, CLEAR), rank_of(branch.out), rank_loss(arch, after)))
        stretches.append(stretch)
    stretch, normed = plus(*stretches), 0.0
    if half.after is not half.summed:
        normed = _ratio(half.after, half.summed)
        own = layer.attention_norm if half.branches[0].kind == "attention" else layer.mlp_norm
        stretch = times(stretch, norm_stretch(arch, own, half.summed))
        ranks.append((rank_of(half.summed, CLEAR), rank_of(half.after), rank_loss(arch, own)))
    return HalfFacts(
        half.weight, _ratio(half.total, half.before), alignment, normed,
        log_of(longest, whole.log[0] + half.total.log[0]), stretch,
        tuple(ranks),
    )  # fmt: skip


def _ratio(state: State, other: State) -> float:
    """log of `mu(state) / mu(other)`; zero over zero is zero."""
    parts = [sized(each.centred()[1]) for each in (state, other)]
    above, below = (log_of(part.value.norm(), part.log[0]) for part in parts)
    return -math.inf if above == -math.inf else above - below


def rank_loss(arch: Architecture, weights: NormWeights) -> int:
    """The most that a norm can take from the affine rank (`ranks.py`), gains that `CLEAR` cannot see through
    counted as zero."""
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
    Y = norm.centre(state.tokens(state.log)[0])
    number = Y.shape[-1] if norm.averaged else 1
    least = float(torch.linalg.vector_norm(Y, dim=-1).min())
    sd = plus(2 * (log(least) + float(state.log[0])) - log(number), log(arch.norm_eps)) / 2
    gain = 1.0 if weights.gain is None else float(weights.gain.abs().max())
    return math.inf if sd == -math.inf else log(gain) - sd


def _mlp_stretch(arch: Architecture, layer: Layer, state: State, norms: MLPNorms) -> float:
    """log of the Lipschitz constant in the 2-norm; of a gated MLP, on these tokens."""
    w = layer.mlp
    assert w is not None
    if w.gate is None:
        return log(norms.spectral)
    if float(torch.maximum(state.x.log_size(), state.R.log_size())[0]) > REACH:
        return math.inf  # beyond what ordinary tokens can hold: no factor, not a small one
    X = state.tokens()[0]
    up, gate = X @ w.up.weight, X @ w.gate.weight
    up = up if w.up.bias is None else up + w.up.bias
    gate = gate if w.gate.bias is None else gate + w.gate.bias
    spectral = [spectral_norm(part.weight) for part in (w.up, w.gate, w.down)]
    opened = float(ACTIVATIONS[arch.activation](gate).abs().max())
    slope = LIPSCHITZ[arch.activation] * float(up.abs().max())
    return log(spectral[2] * (opened * spectral[0] + slope * spectral[1]))


def rank_of(state: State, unit: float | None = None) -> int:
    """The affine rank of the tokens, at any scale of their deviation."""
    return int(numerical_rank(sized(state.centred()[1]).value, unit=unit)[0])

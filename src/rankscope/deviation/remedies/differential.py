"""Differential attention of a state, and the norm on what its heads say."""

from dataclasses import replace
from typing import Any

import torch

from rankscope.deviation.attention import Attention, Logits, Spoken
from rankscope.deviation.scaled import Scaled, chosen
from rankscope.deviation.scores import normed_heads
from rankscope.nets.norms import NormWeights
from rankscope.nets.remedies.differential import Differential, HeadNorm


def differential(remedy: Differential, P: Attention, block: Any, rules: Any, inside: Any) -> Attention:
    """`P - lambda P_2`, both split by the same rule: p and Delta are differences alike, the second's Delta
    without column j* of the first, and rows sum to `total - lambda`."""
    second: Attention = rules.weights(remedy.second(block), inside)
    weight = remedy.weight(block)
    column = P.top[:, :, None].expand(-1, -1, P.others.value.shape[2], 1)
    taken = second.by_head.mapped(lambda t: (t * -weight).scatter(-1, column, 0.0)).normalised()
    p = P.p - weight * second.p
    shared = P.scaled_p and P.scaled_p + Scaled.plain(-weight * second.p).by_head()
    total = (torch.ones_like(weight)[None] if P.total is None else P.total) - weight
    logits = P.logits and second.logits and _steeper(P.logits, second.logits)
    others = P.others + taken
    return replace(P, p=p, others=others, signed=True, total=total, scaled_p=shared, logits=logits)


def _steeper(a: Logits, b: Logits) -> Logits:
    """Of each head the larger scores: whether rounding decides them is asked of these."""
    sizes = [torch.maximum(each.D.log_size(), each.reference.log_size()) for each in (a, b)]
    pick = sizes[0] >= sizes[1]
    ref = torch.where(pick[..., None], a.ref, b.ref)
    return Logits(ref, chosen(pick, a.D, b.D), chosen(pick, a.reference, b.reference))


def head_norm(remedy: HeadNorm, spoken: Spoken, block: Any, rules: Any, inside: Any) -> Spoken:
    """An RMSNorm of every head (`norms.py`), times a number."""
    weights = NormWeights(block.weights.parts[remedy.name]["gain"])
    x, R = normed_heads(spoken.x, spoken.R, weights, spoken.real, remedy.eps, rules.rounding)
    factor = remedy.factor(block.index)
    return replace(spoken, x=x * factor, R=R * factor)

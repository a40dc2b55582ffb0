"""Differential attention of a state, and the norm on what its heads say."""

from dataclasses import replace
from typing import Any

import torch

from rankscope.deviation.attention import DeviationPattern, HeadOutputs, Logits
from rankscope.deviation.gates import sigmoid
from rankscope.deviation.mlp import product
from rankscope.deviation.scaled import Scaled, chosen
from rankscope.deviation.scores import normed_heads
from rankscope.deviation.state import State
from rankscope.nets.norms import NormWeights
from rankscope.nets.remedies.differential import Differential, Differential2, HeadNorm


def differential(
    remedy: Differential, P: DeviationPattern, block: Any, rules: Any, inside: Any
) -> DeviationPattern:
    """`P - lambda P_2`, both split by the same rule: p and Delta are differences alike, the second's Delta
    without column j* of the first, and rows sum to `total - lambda`."""
    second: DeviationPattern = rules.pattern(remedy.second(block), inside)
    weight = remedy.weight(block)
    column = P.top[:, :, None].expand(-1, -1, P.others.value.shape[2], 1)
    taken = second.by_head.mapped(lambda t: (t * -weight).scatter(-1, column, 0.0)).normalised()
    p = P.p - weight * second.p
    shared = P.scaled_p and P.scaled_p + Scaled.plain(-weight * second.p).by_head()
    total = (torch.ones_like(weight)[None] if P.total is None else P.total) - weight
    logits = P.logits and second.logits and _steeper(P.logits, second.logits)
    others = P.others + taken
    return replace(P, p=p, others=others, signed=True, total=total, scaled_p=shared, logits=logits)


def differential2(
    remedy: Differential2, P: DeviationPattern, block: Any, rules: Any, inside: State
) -> DeviationPattern:
    """`P - lambda_i P_2`. With lambda_i = l + d_i, l that of the common token (`gates.py`),

        p_1 - l p_2    is shared, and
        Delta_1 - l Delta_2 - d_i (p_2 + Delta_2)    is not:

    rows sum to `total - l`, and each to `-d_i` beside."""
    second: DeviationPattern = rules.pattern(remedy.second(block), inside)
    W = block.weights.parts[remedy.name]["share"]
    z = rules.perturb(inside.x.mapped(lambda v: v @ W))  # [batch, head]
    d = rules.perturb(inside.R.mapped(lambda v: v @ W))  # [batch, token, head]
    common, own = sigmoid(z.mapped(lambda v: v[..., None]), d.mapped(lambda v: v.mT[..., None]))
    own = own.mapped(lambda t: t * -remedy.weight).normalised()  # [batch, head, token, 1]
    share = remedy.weight * common.explicit()  # [batch, head, 1]
    column = P.top[:, :, None].expand(-1, -1, P.others.value.shape[2], 1)
    Delta = second.by_head
    whole = Scaled.plain(second.p[:, :, None]).by_head() + Delta
    taken = Delta.mapped(lambda t: t * -share[..., None]).normalised() + product(own, whole)
    others = P.others + taken.mapped(lambda t: t.scatter(-1, column, 0.0)).normalised()
    shared = P.scaled_p and P.scaled_p + Scaled.plain(-share * second.p).by_head()
    total = (torch.ones_like(share[..., 0]) if P.total is None else P.total) - share[..., 0]
    sums = own.mapped(lambda t: t[..., 0])
    return replace(
        P,
        p=P.p - share * second.p,
        others=others,
        signed=True,
        total=total,
        row_excess=sums if P.row_excess is None else P.row_excess + sums,
        scaled_p=shared,
        logits=P.logits and second.logits and _steeper(P.logits, second.logits),
    )


def _steeper(a: Logits, b: Logits) -> Logits:
    """Of each head the larger scores: whether rounding decides them is asked of these."""
    sizes = [torch.maximum(each.D.log_size(), each.reference.log_size()) for each in (a, b)]
    pick = sizes[0] >= sizes[1]
    ref = torch.where(pick[..., None], a.ref, b.ref)
    return Logits(ref, chosen(pick, a.D, b.D), chosen(pick, a.reference, b.reference))


def head_norm(remedy: HeadNorm, spoken: HeadOutputs, block: Any, rules: Any, inside: Any) -> HeadOutputs:
    """An RMSNorm of every head (`norms.py`), times a number."""
    weights = NormWeights(block.weights.parts[remedy.name]["gain"])
    x, R = normed_heads(spoken.x, spoken.R, weights, spoken.valid, remedy.eps, rules.perturb_tensor)
    factor = remedy.factor(block.index)
    return replace(spoken, x=x * factor, R=R * factor)

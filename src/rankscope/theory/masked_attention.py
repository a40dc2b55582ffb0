"""Masked attention collapses exponentially (Wu et al. 2024, Thm 1), in an explicit form.

If the mask graph has self-loops and a centre of eccentricity r, then after r layers every token carries
at least `eps^r` of the centre, eps the smallest attention weight met on an edge: the product of r
attention matrices has Dobrushin's coefficient at most `1 - eps^r`, so column by column the range of the
tokens shrinks by it, and (Popoviciu) `||res||_F <= sqrt(N)/2 ||range||_2`:

    mu(X(t)) <= B (sqrt N / 2) ||range(X_0)||_2 (1 - eps^r)^floor(t/r).

One head: `B = ||W(0) ... W(t-1)||_2`. Several: each of the `H^t` paths contracts so, and
`B = prod_t sum_h ||W_h(t)||_2`. Biases move all tokens alike and drop out.
"""

import math

import torch
from torch import Tensor

from rankscope.deviation import Scaled
from rankscope.nets import active_heads
from rankscope.shapes import Float
from rankscope.theory.facts import Facts
from rankscope.theory.hypotheses import Hypothesis, above, at_least, averages, equal, pure_attention
from rankscope.theory.logs import log, log_of, sized, times
from rankscope.theory.theorem import Evaluation, averaging, by_layer, refusal, theorem
from rankscope.theory.weight_norms import lost, spectral_norm, value_parts


def log_values(facts: Facts) -> list[float]:
    """The natural log of B at every layer."""
    arch, device = facts.arch, facts.net.device
    logs_by_layer: list[float] = []
    heads = [active_heads(arch, index) for index in range(facts.depth)]
    if all(len(active) == 1 for active in heads):
        # The product as it is computed, and how far from it the true one may be: products can all but cancel.
        product, g = torch.eye(arch.width, dtype=torch.float64, device=device), lost(arch.width)
        off = scale = 0.0
        for layer, (head,), layer_facts in zip(facts.net.weights.layers, heads, facts.layers, strict=True):
            value, output = value_parts(arch, layer, head)
            W = value @ output
            off = off * float(layer_facts.heads.spectral[0]) + g * float(product.norm() * W.norm())
            off += g * float(product.norm() * value.norm() * output.norm())
            product = product @ W
            size = float(spectral_norm(product)) + off
            if size == 0.0 or not math.isfinite(size):
                return logs_by_layer + [log(size)] * (facts.depth - len(logs_by_layer))
            product, off, scale = product / size, off / size, scale + math.log(size)
            logs_by_layer.append(scale)
        return logs_by_layer
    total = 0.0
    for layer_facts in facts.layers:
        total = times(total, log(float(layer_facts.heads.spectral.sum())))
        logs_by_layer.append(total)
    return logs_by_layer


def log_range(X: Float[Tensor, "token width"]) -> float:
    """log of `||range X||_2`, the range of every entry over the tokens."""
    spread = sized(Scaled.plain((X.amax(0) - X.amin(0))[None]))
    return log_of(spread.value.norm(), spread.log[0])


def connected(facts: Facts) -> list[Hypothesis]:
    """One mask graph with self-loops (A1) and a centre."""
    return [
        equal("different masks", len(facts.visible), 1),
        equal("tokens that do not attend to themselves", not facts.graph.self_loops, 0),
        at_least("centres of the mask graph", len(facts.graph.centres), 1),
    ]


def log_smallest(facts: Facts, upto: int) -> float:
    """log eps over the first layers."""
    return min((layer.log_smallest for layer in facts.layers[:upto]), default=0.0)


def positive(facts: Facts, upto: int) -> Hypothesis:
    """eps is above zero: not underflown."""
    return above("smallest attention weight on an edge", math.exp(log_smallest(facts, upto)), 0, measured=True)


def log_shrink(log_share: float) -> float:
    """log(1 - share), from the log of the share."""
    share = math.exp(log_share)
    return -math.inf if share >= 1 else math.log1p(-share)


@theorem("wu2024-1", "Wu et al. 2024, Thm 1, explicit", "mu", "upper")
def masked(facts: Facts) -> Evaluation:
    """mu <= B (sqrt N / 2) ||range X_0|| (1 - eps^r)^floor(t/r)"""
    arch, radius = facts.arch, facts.graph.radius
    fixed = [*pure_attention(arch), averages(arch), *connected(facts)]
    if refused := refusal(facts, fixed):
        return refused
    start = facts.of_tokens("range", lambda: log_range(facts.X)) + 0.5 * math.log(facts.token_count) - math.log(2)
    bounds = []
    for layer, B in enumerate(facts.norms.of_all("values", facts.net, lambda: log_values(facts)), 1):
        if not radius:  # no centre, or one token alone
            bounds.append(math.inf if radius is None else -math.inf)
            continue
        rounds = layer // radius
        shrink = log_shrink(radius * log_smallest(facts, layer))
        bounds.append(times(start, B, rounds * shrink if rounds else 0.0))
    hypotheses = by_layer(facts, fixed, lambda upto: [*averaging(facts, upto), positive(facts, upto)])
    return Evaluation(bounds, hypotheses)

"""Bounds of Wu et al. 2024, in an explicit form: masked attention collapses exponentially, on a sphere too.

**Thm 1**: if the mask graph has self-loops and a centre of eccentricity r, then after r layers every token carries
at least `eps^r` of the centre, eps the smallest attention weight met on an edge: the product of r
attention matrices has Dobrushin's coefficient at most `1 - eps^r`, so column by column the range of the
tokens shrinks by it, and (Popoviciu) `||res||_F <= sqrt(N)/2 ||range||_2`:

    mu(X(t)) <= B (sqrt N / 2) ||range(X_0)||_2 (1 - eps^r)^floor(t/r).

One head: `B = ||W(0) ... W(t-1)||_2`. Several: each of the `H^t` paths contracts so, and
`B = prod_t sum_h ||W_h(t)||_2`. Biases move all tokens alike and drop out.

**Tokens on a sphere** (Thm 2, Cor 1): attention, orthogonal values, a norm that only scales. `X' = D A X W`, D > 0
making every token of one length, W orthogonal (or a multiple, which D takes out). No token may be zero: a norm leaves
it there. Let y_i be the directions, `m = min cos(y_i, y_j)`.

**Cor 1**, cosines not negative. `y_i(t+r) = sum_j q_ij y_j(t)` with `q_ij >= eps^r` for every j that
reaches i in r layers, and `sum_j q_ij >= 1`, since averages of unit vectors are no longer than one. So
`cos(y_i, y_k) >= m + (1 - m) sum_c q_ic q_kc` over the tokens c that reach both:

    1 - m(t) <= (1 - n_r eps^(2r))^floor(t/r) (1 - m(0)),      mu <= length sqrt((N - 1) (1 - m)),

n_r the number of tokens that reach ALL others within r layers. (The paper's Thm 2 has N here, which is
right for a complete graph; with a window only the middle token reaches all so fast.)

**Thm 2**, strongly connected, N <= d, tokens of full rank: some layer has cosines that are not negative,
and the bound runs from the first such layer; before it `mu <= length sqrt N`.

**Hemisphere** (this project): if one direction w has `cos(y_i, w) >= alpha > 0` for all tokens, the points
`p_i = y_i / <y_i, w>` of the tangent plane move by averages with weights at least `alpha eps` on edges, so

    mu <= length sqrt((N - 1)/2) max|p_i - p_j| (1 - (alpha eps)^r)^floor(t/r).

It needs a centre only, and its constant is explicit from layer 0; the other two follow directions from layer 1 on.
"""

import math
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from rankscope.deviation import LOWEST, Scaled, normalise
from rankscope.nets import NormWeights, active_heads, converted
from rankscope.shapes import Bool, Float
from rankscope.theory.logs import log, log_of, product, sized, times
from rankscope.theory.theorem import (
    Evaluation,
    Facts,
    Hypothesis,
    above,
    at_least,
    at_most,
    by_layer,
    equal,
    refusal,
    theorem,
)
from rankscope.theory.weight_norms import lost, spectral_norm, value_parts


def log_values(facts: Facts) -> list[float]:
    """The natural log of B at every layer."""
    arch, device = facts.arch, facts.net.device
    logs_by_layer: list[float] = []
    heads = [active_heads(arch, index) for index in range(facts.depth)]
    if all(len(active) == 1 for active in heads):
        # The product as it is computed, and how far from it the true one may be: products can all but cancel.
        so_far, g = torch.eye(arch.width, dtype=torch.float64, device=device), lost(arch.width)
        off = scale = 0.0
        for layer, (head,), layer_facts in zip(facts.net.weights.layers, heads, facts.layers, strict=True):
            value, output = value_parts(arch, layer, head)
            W = value @ output
            off = off * float(layer_facts.heads.spectral[0]) + g * float(so_far.norm() * W.norm())
            off += g * float(so_far.norm() * value.norm() * output.norm())
            so_far = so_far @ W
            size = float(spectral_norm(so_far)) + off
            if size == 0.0 or not math.isfinite(size):
                return logs_by_layer + [log(size)] * (facts.depth - len(logs_by_layer))
            so_far, off, scale = so_far / size, off / size, scale + math.log(size)
            logs_by_layer.append(scale)
        return logs_by_layer
    return product(0.0, [log(float(layer_facts.heads.spectral.sum())) for layer_facts in facts.layers])


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


def log_smallest(facts: Facts) -> list[float]:
    """By layer from 1 on, log eps: of the smallest attention weight on an edge in it and the layers before."""
    return [*accumulate([layer.log_smallest for layer in facts.layers], min)]


def positive(facts: Facts) -> list[Hypothesis]:
    """By layer, the hypothesis that eps is above zero: not underflown."""
    says = "smallest attention weight on an edge"
    return [above(says, math.exp(log_eps), 0, measured=True) for log_eps in log_smallest(facts)]


def log_shrink(log_share: float) -> float:
    """log(1 - share), from the log of the share."""
    share = math.exp(log_share)
    return -math.inf if share >= 1 else math.log1p(-share)


@theorem("wu2024-1", "Wu et al. 2024, Thm 1, explicit", "mu", "upper")
def masked(facts: Facts) -> Evaluation:
    """mu <= B (sqrt N / 2) ||range X_0|| (1 - eps^r)^floor(t/r)"""
    radius = facts.graph.radius
    fixed = [*facts.premises.pure_attention, facts.premises.averages, *connected(facts)]
    if refused := refusal(facts, fixed):
        return refused
    start = facts.of_tokens("range", lambda: log_range(facts.X)) + 0.5 * math.log(facts.token_count) - math.log(2)
    bounds, values = [], facts.norms.of_all("values", facts.net, lambda: log_values(facts))
    for layer, (B, log_eps) in enumerate(zip(values, log_smallest(facts), strict=True), 1):
        if not radius:  # no centre, or one token alone
            bounds.append(math.inf if radius is None else -math.inf)
            continue
        rounds = layer // radius
        shrink = log_shrink(radius * log_eps)
        bounds.append(times(start, B, rounds * shrink if rounds else 0.0))
    return Evaluation(bounds, by_layer(facts, fixed, facts.averaging, positive(facts)))


ORTHOGONAL = 1e-9  # How far W may be from a multiple of an orthogonal matrix: it enters the bound once a layer
NOT_NEGATIVE = 1e-9  # Measured cosines count as not negative from here on


def one_length(facts: Facts, centring: bool = False) -> list[Hypothesis]:
    """Every token comes out of a post-norm with the same length: no gain of its own, no bias, no eps.

    `centring`: whether a LayerNorm will do as well."""
    arch = facts.arch
    kinds = ("scale", "rms", "layer") if centring else ("scale", "rms")
    spread, bias = facts.of_network("norms", lambda: _gains_and_biases(facts))
    normed = arch.norm in kinds and facts.premises.normed_sums
    return [
        equal(f"layers without a norm after attention ({', '.join(kinds)})", not normed, 0),
        # Exactly zero: with anything else lengths differ, and a bound below that is false.
        equal("norm's eps", arch.norm_eps, 0),
        equal("spread of the norms' gains", spread, 0),
        equal("largest bias of the norms", bias, 0),
        above("length of the shortest token at layer 0", math.exp(facts.sizes[0].shortest), 0),
    ]


def _gains_and_biases(facts: Facts) -> tuple[float, float]:
    """(the most that the gains of a norm after attention differ by, the largest |bias| of one)."""
    norms = [layer.attention_norm for layer in facts.net.weights.layers]
    gains = [norm.gain for norm in norms if norm.gain is not None]
    biases = [norm.bias for norm in norms if norm.bias is not None]
    spread = float((torch.stack(gains).amax(-1) - torch.stack(gains).amin(-1)).max()) if gains else 0.0
    return spread, float(torch.stack(biases).abs().max()) if biases else 0.0


def of_one_length(facts: Facts) -> list[Hypothesis]:
    """By layer, the hypothesis that no norm so far met a token of length zero, which it leaves at zero."""
    hypotheses: list[Hypothesis] = []
    log_ratios: list[float] = []
    says = "shortest token, in lengths of the longest"
    for sizes in facts.sizes[1:]:
        log_ratios += [sizes.shortest - sizes.longest] if sizes.longest > -math.inf else []
        ratio = math.exp(min(log_ratios, default=0.0))  # 0 or 1, but for rounding: nothing between can come out
        hypotheses.append(Hypothesis(says, ratio, "= 1", ratio > 1 - 1e-9))
    return hypotheses


def orthogonal_values(facts: Facts) -> tuple[list[Hypothesis], float]:
    """(one head, its values a multiple of an orthogonal matrix, and no bias on the way; delta, by which the
    squares of W's singular values may differ from one another, as a share)."""
    arch, layers = facts.arch, facts.net.weights.layers
    heads = [active_heads(arch, index) for index in range(facts.depth)]
    head_counts = [len(active) for active in heads]
    hypotheses = [equal("heads", max(head_counts, key=lambda count: abs(count - 1)), 1)]
    if not hypotheses[0].met:
        return hypotheses, math.inf
    defect = bias = 0.0
    for layer, (head,) in zip(layers, heads, strict=True):
        value, output = value_parts(arch, layer, head)
        W = value @ output
        square, g = W @ W.mT, lost(*W.shape)
        mean = float(square.diagonal().mean())
        off = float((square - mean * torch.eye(len(square), dtype=W.dtype, device=W.device)).norm())
        off += g * float(W.norm() ** 2 + 2 * W.norm() * value.norm() * output.norm())  # of what rounding moved
        defect = max(defect, off / mean if mean > 0 else math.inf)
        for part in (layer.attention.value, layer.attention.output):
            bias = max(bias, 0.0 if part.bias is None else float(part.bias.abs().max()))
    hypotheses.append(at_most("|W W^T - 1| of the values", defect, ORTHOGONAL))
    return [*hypotheses, equal("bias of values", bias, 0)], defect


def reaching(M: Bool[Tensor, "token token"], layers: int) -> int:
    """How many tokens reach every token within so many layers; tokens reach themselves."""
    power, reach = M.double(), torch.eye(len(M), dtype=torch.float64)
    while layers:
        if layers % 2:
            reach = (reach @ power).clamp(max=1.0)
        power = (power @ power).clamp(max=1.0)
        layers //= 2
    return int((reach > 0).all(0).sum())


def _on_sphere(facts: Facts) -> tuple[list[Hypothesis], float]:
    """(what all three ask for, delta of `orthogonal_values`)."""
    orthogonal, delta = facts.of_network("orthogonal", lambda: orthogonal_values(facts))
    of_parts = [facts.premises.softmax, facts.premises.no_skip, facts.premises.no_mlp]
    return [*of_parts, *one_length(facts), *orthogonal, *connected(facts)], delta


def _evaluation(facts: Facts, bounds: list[float], fixed: list[Hypothesis]) -> Evaluation:
    return Evaluation(bounds, by_layer(facts, fixed, facts.averaging, positive(facts), of_one_length(facts)))


def _cosines(facts: Facts, start: int | None, delta: float) -> list[float]:
    """The bound that runs from layer `start` on, whose cosines are not negative.

    W of singular values within a factor `1 + delta` multiplies distances of directions by no more than it,
    and may take so much from a cosine of zero, of which averages of N tokens make N times as much."""
    radius, N = facts.graph.radius, facts.token_count
    if N == 1:
        return [-math.inf] * facts.depth
    if radius is None:
        return [math.inf] * facts.depth
    count, bounds = reaching(facts.mask, radius), []
    for layer in range(1, facts.depth + 1):
        length = facts.sizes[layer].longest
        if start is None or layer < start:
            bounds.append(length + 0.5 * math.log(N))
            continue
        gap = facts.sizes[start].log_cosine_gap
        rounds = (layer - start) // radius
        eps = min((layer_facts.log_smallest for layer_facts in facts.layers[start:layer]), default=0.0)
        shrink = log_shrink(math.log(count) + 2 * radius * eps) if count else 0.0
        bent = 2 * (1 + N) * layer * delta
        bounds.append(times(length, 0.5 * math.log(N - 1), 0.5 * gap, 0.5 * rounds * shrink if rounds else 0.0, bent))
    return bounds


def directions(X: Float[Tensor, "token width"]) -> Float[Tensor, "token width"]:
    """The rows of length one, however large or small they are; zero where they are zero."""
    return torch.nn.functional.normalize(X / X.abs().amax(-1, keepdim=True).clamp(min=5e-324), dim=-1)


def _least_cosine(X: Float[Tensor, "token width"]) -> float:
    """The smallest cosine of two tokens, less what rounding may have added."""
    Y = directions(X)
    return float((Y @ Y.mT - lost(Y.shape[1]) * (Y.abs() @ Y.abs().mT)).min())


@theorem("wu2024-cor1", "Wu et al. 2024, Cor 1, explicit", "mu", "upper")
def cosines(facts: Facts) -> Evaluation:
    """mu <= length sqrt((N-1)(1-m)) (1 - n_r eps^(2r))^(floor(t/r)/2), cosines not negative"""
    fixed, delta = _on_sphere(facts)
    if refused := refusal(facts, fixed):
        return refused
    least = facts.of_tokens("least cosine", lambda: _least_cosine(facts.X))
    fixed.append(at_least("smallest cosine at layer 0", least, 0))
    return _evaluation(facts, _cosines(facts, 1, delta), fixed)


@theorem("wu2024-2", "Wu et al. 2024, Thm 2, prefactor corrected", "mu", "upper")
def full_rank(facts: Facts) -> Evaluation:
    """mu <= length sqrt((N-1)(1-m)) (1 - n_r eps^(2r))^(floor((t-t0)/r)/2), from the layer t0 with m >= 0"""
    layers = range(1, facts.depth + 1)
    start = next((layer for layer in layers if facts.sizes[layer].cosine >= NOT_NEGATIVE), None)
    (fixed, delta), N = _on_sphere(facts), facts.token_count
    if refused := refusal(facts, fixed):
        return refused
    rank = facts.of_tokens("rank", lambda: float(torch.linalg.matrix_rank(facts.X)))
    fixed += [
        equal("tokens that are no centre", N - len(facts.graph.centres), 0),
        at_most("tokens, against the width", N, facts.arch.width),
        equal("rank of the tokens at layer 0", rank, N),
    ]
    return _evaluation(facts, _cosines(facts, start, delta), fixed)


def hemisphere(Y: Float[Tensor, "token width"]) -> tuple[Tensor, float]:
    """(w, alpha): the direction whose smallest cosine with the unit tokens is largest, and that cosine, less what
    rounding may have added. w points to the point of their convex hull nearest to zero: non-negative least squares."""
    from scipy.optimize import nnls

    A = np.vstack([Y.cpu().numpy().T, np.ones(len(Y))])
    share, _ = nnls(A, np.r_[np.zeros(Y.shape[1]), 1.0])
    w = torch.from_numpy(share).to(Y) @ Y
    size = float(w.norm())
    if size == 0.0:
        return w, 0.0
    w = w / size
    return w, float((Y @ w).min()) - lost(Y.shape[1])


def _log_apart(facts: Facts, w: Float[Tensor, " width"], heights: Float[Tensor, " token"]) -> float:
    """log of max|p_i - p_j|. Where tokens are close, y = c + e with c common, no nearly equal points are subtracted in

    p_i - c / <c, w> = (<c, w> e_i - <e_i, w> c) / (<y_i, w> <c, w>).
    """
    state = normalise(converted(facts.first, Tensor.cpu), "scale", NormWeights(), 0.0)
    c, e, log_unit = state.x.explicit()[0], state.R.value[0], float(state.R.log[0])
    if float(state.x.log[0]) <= LOWEST:  # far apart: e is y
        p, log_unit = state.tokens()[0] / heights[:, None], 0.0
    else:
        p = (float(c @ w) * e - (e @ w)[:, None] * c) / (heights * float(c @ w))[:, None]
    largest = torch.cdist(p, p, compute_mode="donot_use_mm_for_euclid_dist").max()
    return log(float(largest)) + log_unit


@theorem("hemisphere", "this project", "mu", "upper")
def in_hemisphere(facts: Facts) -> Evaluation:
    """mu <= length sqrt((N-1)/2) max|p_i - p_j| (1 - (alpha eps)^r)^floor(t/r)"""
    lengths = torch.linalg.vector_norm(facts.X, dim=-1)
    (fixed, delta), alpha = _on_sphere(facts), 0.0
    if refused := refusal(facts, fixed):
        return refused
    radius, N, bounds = facts.graph.radius, facts.token_count, [math.inf] * facts.depth
    if float(lengths.min()) > 0 and radius is not None:
        Y = facts.X / lengths[:, None]
        w, alpha = facts.of_tokens("hemisphere", lambda: hemisphere(Y))
        if alpha > 0 and N > 1:
            heights = Y @ w
            weighted = lengths * heights
            off = lost(facts.arch.width) / alpha  # of a height, as a share
            share = min(alpha, float(weighted.min() / weighted.max())) / (1 + 4 * off)
            start = _log_apart(facts, w, heights) + 0.5 * math.log((N - 1) / 2) + 8 * off
            for layer, log_eps in enumerate(log_smallest(facts), 1):
                rounds = layer // radius
                shrink = log_shrink(radius * (math.log(share) + log_eps))
                bent, shrunk = 8 * (1 + radius) * layer * delta, rounds * shrink if rounds else 0.0
                bounds[layer - 1] = times(facts.sizes[layer].longest, start, shrunk, bent)
        elif N == 1:
            bounds = [-math.inf] * facts.depth
    fixed.append(above("smallest cosine of a token with one direction", alpha, 0))
    return _evaluation(facts, bounds, fixed)

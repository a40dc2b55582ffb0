"""Gradients at the weights of queries and keys, at any scale: autograd has rounding of them where tokens are the same.

Called by `gradients.py` for each layer. With G_i the gradient at a head's output for token i, `v_j = v + e^s r_j` the
values, P the pattern and c the divisor, the gradient at scores is

    dS_ij = P_ij (a_ij - sum_k P_ik a_ik),    a_ij = G_i . v_j.

What all values have in common drops out, and dS is e^s times that of r. Rows of dS sum to zero, so that of keys
`k + e^s k_j` the common part drops out of `dQ_i = sum_j dS_ij k_j / c`; `dK_j = sum_i dS_ij q_i / c` sums to zero over
j, and what tokens have in common drops out of `dW_K = X^T dK`. **Both gradients are e^{2s}**, and are formed of r, k_j
and the deviations R of tokens. Where positions rotate, keys of equal tokens differ: the common value alone drops out,
and both are e^s.

The other end is attention to one token alone. There a_ij is taken about that of the largest entry of a row, the others
keep the log of P, and dS at the largest follows from the sum: P = 1 - 1e-400 is read as well.
"""

import math
from typing import Any, cast

import torch
from torch import Tensor

from rankscope.deviation import LOWEST, DeviationPattern, Scaled, State, StateHeads, Values, spread
from rankscope.nets import Architecture, AttentionWeights, Block, pieces, rotate
from rankscope.remedies import PatternShaping


def has_formula(arch: Architecture) -> bool:
    """True if scores are those of the formula: products of queries and keys, and what positions add or rotate, under a
    softmax, of which parts make at most `alpha I + beta P - gamma C`.

    >>> [has_formula(Architecture(layers=1, width=8, heads=2, query_norm=normed)) for normed in (False, True)]
    [True, False]
    """
    shaped = all(isinstance(part, PatternShaping) for part in pieces(arch.parts) if part.place == "pattern")
    products = not (arch.score_cap or arch.query_norm or arch.positions == "relative")
    return arch.kernel == "softmax" and products and shaped


def query_and_key(
    rules: Any, block: Block, state: State, P: DeviationPattern, values: Values, G: Scaled
) -> tuple[Tensor, Tensor]:
    """The logs of the norms of the gradients at the weights of queries and of keys of a layer, over all samples.

    Args:
        rules: Deviation arithmetic, as it went through the layer.
        block: The layer.
        state: What its attention read.
        P: The pattern that its scores gave, before parts changed it.
        values: The values that it mixed.
        G: The gradient at the outputs of heads `[batch, head, token, width]`, one log per sample.
    """
    arch, w, dS = block.arch, block.weights.attention, _at_scores(block, P, values, G)
    asking, answering = rules.latent(state, w.query_latent), rules.latent(state, w.key_latent)
    perturbations = (rules.perturb, rules.perturb_tensor)
    heads = StateHeads(arch, block.index, w, asking, rules.settings, *perturbations, answering)
    (q, dq, k, dk), turned = heads.split_heads, dS.mapped(lambda t: t.mT)
    if rules.settings.rotary:
        cos, sin = rules.settings.rotary_of(block.index)
        queries, keys = (_rotated(_of_tokens(*parts), cos, sin, arch) for parts in ((q, dq), (k, dk)))
        dQ, dK = (_rotated(part, cos, -sin, arch) for part in (_times(dS, keys), _times(turned, queries)))
        read = Scaled(answering.scaled_tokens, answering.log)
    else:
        dQ, dK = _times(dS, dk), _times(turned, _of_tokens(q, dq))
        read = answering.R
    gain = arch.log_gain * math.log(P.p.shape[-1]) if arch.log_gain else 1.0
    factor = math.log(abs(gain) / arch.divisor) if gain else -math.inf
    of_queries = _weight_log(Scaled(asking.scaled_tokens, asking.log), dQ, arch.heads)
    return of_queries + factor, _weight_log(read, dK, arch.key_heads) + factor


def uncancelled(
    arch: Architecture, w: AttentionWeights, q: Tensor, k: Tensor, values: Values, G: Tensor
) -> tuple[Tensor, Tensor]:
    """The logs of the norms that gradients of queries and keys would have if nothing cancelled and attention were to
    many tokens: 1e-16 of them is what autograd rounds, or takes as zero.

    Args:
        arch: The architecture of the network.
        w: The tensors of the layer's attention, in a graph of autograd.
        q: Its queries `[batch, head, token, width]` as they meet keys, in that graph.
        k: Its keys.
        values: The values that it mixed.
        G: The gradient at the outputs of heads.
    """
    length = torch.maximum(values.x.log_size(), values.R.log_size()).exp()[..., None, None] * G.shape[-1] ** 0.5
    longest = sum(part.detach().norm(dim=-1).amax(-1)[..., None, None] for part in (q, k))
    size = G.norm(dim=-1, keepdim=True) * length * (longest / arch.divisor + 1)
    sizes = []
    for part, linear in ((q, w.query), (k, w.key)):
        signs = torch.randn(part.shape, generator=torch.Generator().manual_seed(0), dtype=G.dtype).to(G.device).sign()
        sizes.append(log_norm(torch.autograd.grad(part, linear.weight, signs * size, retain_graph=True)[0]))
    return sizes[0], sizes[1]


class ReadRecorder:
    """Mixed into deviation arithmetic: keeps by layer what attention read, its pattern and the values it mixed."""

    reads: dict[int, tuple[State, DeviationPattern]]
    values_mixed: dict[int, Values]

    def pattern(self, block: Block, state: State) -> DeviationPattern:
        """The pattern; of several that a layer may have, the first is kept: parts ask for a second one."""
        P = cast(DeviationPattern, super().pattern(block, state))
        self.reads.setdefault(block.index, (state, P))
        return P

    def mix(self, block: Block, P: DeviationPattern, values: Values) -> Any:
        """The outputs of heads; values of attention are kept, not those of cross-attention after it."""
        self.values_mixed.setdefault(block.index, values)
        return super().mix(block, P, values)


class HeadRecorder:
    """Mixed into plain arithmetic: keeps by layer queries, keys and the outputs of heads, for autograd."""

    head_outputs: dict[int, Tensor]
    queries_and_keys: dict[int, tuple[Tensor, Tensor]]

    def scored(self, block: Block, X: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries, keys and what positions add to their scores; the first that a layer asks for are kept."""
        q, k, added = super().scored(block, X)
        self.queries_and_keys.setdefault(block.index, (q, k))
        return q, k, added

    def only_active(self, block: Block, heads: Tensor) -> Tensor:
        """The outputs of heads, zero at those that are not active; kept as they were."""
        self.head_outputs.setdefault(block.index, heads)
        return cast(Tensor, super().only_active(block, heads))


def _at_scores(block: Block, P: DeviationPattern, values: Values, G: Scaled) -> Scaled:
    """dS `[batch, head, row, token]`, the gradient at scores."""
    assert P.logits is not None
    a = G.value @ values.R.value.mT
    for part in pieces(block.arch.parts):
        if isinstance(part, PatternShaping):
            a = a * part.of_heads(block, a)[1][:, None, None]  # beta of alpha I + beta P - gamma C
    log_P = P.logits.log_softmax(P.visible)
    top = log_P.argmax(-1, keepdim=True)
    log_rest = log_P.scatter(-1, top, -torch.inf)
    a = a - a.gather(-1, top)
    a = a - (log_rest.exp() * a).sum(-1, keepdim=True)
    logs = log_rest + a.abs().log()  # by entry: a row of large P may have no gradient at all
    reach = logs.amax((2, 3)).clamp(min=LOWEST)
    dS = (logs - spread(reach, logs)).exp() * a.sign()
    dS = dS.scatter(-1, top, -dS.sum(-1, keepdim=True))
    return Scaled(dS, G.log[:, None] + values.R.log + reach).unit()


def _of_tokens(common: Scaled, deviation: Scaled) -> Scaled:
    """Queries or keys of tokens `[batch, head, token, head_width]`: those of the common token and what tokens add."""
    return common.mapped(lambda t: t[:, :, None].expand_as(deviation.value)) + deviation


def _rotated(heads: Scaled, cos: Tensor, sin: Tensor, arch: Architecture) -> Scaled:
    """Queries or keys turned by their positions; with -sin gradients at them, turned back."""
    return heads.mapped(lambda t: rotate(t, (cos, sin), arch.rotary_pairs))


def _times(dS: Scaled, heads: Scaled) -> Scaled:
    return Scaled(dS.value @ heads.value, dS.log + heads.log).unit()


def _weight_log(read: Scaled, gradient: Scaled, heads: int) -> Tensor:
    """The log of the norm of `sum_t x_t g_t^T` over samples and tokens: x is what a linear map of so many heads read, g
    the gradient at what it gave, one for each head of queries."""
    value = torch.einsum("btw,bhtc->bhwc", read.value, gradient.value)
    products = Scaled(value, gradient.log + read.log[:, None]).unit()
    largest = products.log.amax()
    total = products.at(largest.expand_as(products.log)).sum(0)
    return log_norm(total.reshape(heads, -1, *total.shape[1:]).sum(1)) + largest


def log_norm(t: Tensor, axes: int = 0) -> Tensor:
    """The log of the norm of what stands after the first axes, -inf of zeros; no square leaves float64.

    >>> round(float(log_norm(torch.full((4,), 1e-300, dtype=torch.float64)) / math.log(10)), 4)
    -299.699
    """
    flat = t.reshape(*t.shape[:axes], -1)
    size = flat.abs().amax(-1, keepdim=True)
    size = size.masked_fill(size == 0, 1.0)
    return torch.linalg.vector_norm(flat / size, dim=-1).log() + size[..., 0].log()

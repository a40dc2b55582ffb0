"""Attention of a state: the part of P that differs from row to row, and nothing else, acts on the deviation.

With X = 1 x^T + e^s R, query q_i = q + dq_i and key k_j = k + dk_j, a score splits into

    q_i . k_j = [constant along the row: drops out of the softmax] + [ref_j: the same in every row] + D_ij.

For plain heads `ref_j = q . dk_j` and `D_ij = dq_i . dk_j`, of order e^{2s}. Let p = softmax(ref), j* its
largest entry, and D_ij* = 0 in every row (one more constant along rows). Then P_ij = p_j e^{D_ij} / S_i with

    S_i = sum_j p_j e^{D_ij} = 1 + m_i,   m_i = sum_{j != j*} p_j expm1(D_ij) >= p_j* - 1,
    P_ij - p_j = p_j expm1(D_ij - log S_i).

Rows of P sum to one, so `P X = 1 (x + e^s p^T R) + e^s (P - 1 p^T) R`: the common token moves to the
weighted mean, and the deviation is multiplied by P - 1 p^T. Taken about row j* of R, the column j* of P, of
which only 1 - p_j* is left to see when attention is sharp, takes no part. When e^{2s} leaves floating point's
range, expm1(D) is D and 2s goes into the scale; so does log p where p underflows. Masked entries are
expm1 = -1. Positions put terms of order one, and of order e^s, into D.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rankscope.deviation.mlp import affine
from rankscope.deviation.scaled import LOWEST, STEEPEST, Logs, Scaled, spread
from rankscope.deviation.state import Real, State, doubtful
from rankscope.nets.architecture import Architecture
from rankscope.nets.block import Setting
from rankscope.nets.positions import by_offset, rotate
from rankscope.nets.weights import Attention as AttentionWeights
from rankscope.nets.weights import Layer, Linear

Visible = Bool[Tensor, "batch 1 token token"]


@dataclass(frozen=True)
class Attention:
    """Attention of a layer in two parts: `P = 1 p^T + Delta`."""

    p: Float[Tensor, "batch head token"]
    Delta: Scaled  # [batch, head, token, token]
    visible: Visible

    def matrix(self) -> Float[Tensor, "batch head token token"]:
        """P as an ordinary tensor."""
        return (self.p[:, :, None] + self.Delta.explicit()).clamp(min=0.0) * self.visible


def attention(
    arch: Architecture, index: int, layer: Layer, state: State, setting: Setting
) -> tuple[State, Attention]:
    """The attention branch of a state, and its attention."""
    w = layer.attention
    v, dv = heads(state.x, w.value, arch), deviations(state.R, w.value, arch)
    ref, D, size = scores(arch, w, state, setting)
    visible = setting.visible[arch.mask_of(index)].expand(len(state.real.rows), -1, -1, -1)
    P, top = split(ref, D, visible, state.real)
    # Rows of P sum to one: the common value passes, the deviation is averaged and differenced, both about
    # the token that most attend to.
    most = dv.value.gather(
        2, top[..., None].expand(-1, -1, -1, dv.value.shape[-1])
    )  # [batch, head, 1, width]
    about = dv.value - most
    mean = Scaled((most + P.p[:, :, None] @ about)[:, :, 0], dv.log)  # [batch, head, head_width]
    spoken = Scaled(P.Delta.value @ about, P.Delta.log + dv.log)  # [batch, head, token, head_width]
    x, R = v + mean, spoken
    if arch.kept_heads is not None:
        speaks = torch.zeros(arch.heads, 1, dtype=x.value.dtype, device=x.value.device)
        speaks[list(arch.kept_heads[index])] = 1.0
        x, R = x.mapped(lambda t: t * speaks), R.mapped(lambda t: t * speaks[:, None])
    out = Linear(w.output.weight.flatten(0, 1), w.output.bias)
    noise = _noise(state.doubt, size, P, Scaled(about, dv.log), dv)
    branch = State(
        affine(x.mapped(lambda t: t.flatten(1)), out),
        R.mapped(lambda t: t.transpose(1, 2).flatten(-2) @ out.weight),
        state.real,
        doubtful(state.doubt, noise - state.doubt, R.log_size()),
    )
    return branch, P


def _noise(doubt: Logs, size: Logs, P: Attention, about: Scaled, dv: Scaled) -> Logs:
    """log of the rounding in `(P - 1 p^T) R`: of values that P - 1 p^T weighs, whether or not they differ; of
    scores of that size, which move the weights p among values that differ; and of both at once."""
    weight = torch.linalg.vector_norm(P.Delta.value, ord=1, dim=-1)
    weight = weight.flatten(1).amax(1) if weight.numel() else torch.zeros_like(doubt)
    of_values = Scaled(weight[:, None], P.Delta.log).log_size() + doubt + dv.log_size()
    moved = Scaled(P.p[:, :, None] @ about.value.abs(), about.log).log_size()
    of_scores = (doubt + size).clamp(max=0.0) + torch.maximum(moved, doubt + dv.log_size())
    return torch.maximum(of_values, of_scores)


def heads(x: Scaled, linear: Linear, arch: Architecture) -> Scaled:
    """The common token's query, key or value: `[batch, head, head_width]`."""
    flat = Linear(linear.weight.flatten(1), None if linear.bias is None else linear.bias.flatten())
    count, width = linear.weight.shape[1:]
    return affine(x, flat).mapped(lambda t: _grouped(t.view(len(t), count, width), arch.heads))


def deviations(R: Scaled, linear: Linear, arch: Architecture) -> Scaled:
    """The tokens' deviations from it: `[batch, head, token, head_width]`."""
    count, width = linear.weight.shape[1:]
    flat = linear.weight.flatten(1)
    return R.mapped(
        lambda t: _grouped((t @ flat).view(*t.shape[:2], count, width).transpose(1, 2), arch.heads)
    )


def _grouped(t: Tensor, count: int) -> Tensor:
    return t if t.shape[1] == count else t.repeat_interleave(count // t.shape[1], 1)


def scores(
    arch: Architecture, w: AttentionWeights, state: State, setting: Setting
) -> tuple[Float[Tensor, "batch head token"], Scaled, Logs]:
    """(ref_j, D_ij, log of the largest score) after the divisor; what is constant along a row is left out."""
    n = state.real.rows.shape[1]
    zero = state.R.value.new_zeros(len(state.real.rows), arch.heads, n)
    if arch.kernel == "uniform":
        D = Scaled.plain(zero[..., None].expand(-1, -1, -1, n)).normalised()
        return zero, D, D.log
    q, dq = heads(state.x, w.query, arch), deviations(state.R, w.query, arch)
    k, dk = heads(state.x, w.key, arch), deviations(state.R, w.key, arch)
    ref = Scaled.plain(zero)
    if arch.kernel == "gaussian":
        # -|k_j|^2 / 2 is the same in every row.
        ref = ref + Scaled(-(dk.value @ k.value[..., None])[..., 0], dk.log + k.log)
        ref = ref + Scaled(-dk.value.square().sum(-1) / 2, 2 * dk.log)
    content = q if w.content_bias is None else q + Scaled.plain(w.content_bias.expand_as(q.value))
    if setting.rotary is None:
        ref = ref + Scaled((dk.value @ content.value[..., None])[..., 0], dk.log + content.log)
        D = Scaled(dq.value @ dk.value.mT, dq.log + dk.log)
    else:
        turned = [
            part.mapped(lambda t: rotate(t, setting.rotary, arch.rotary_pairs))  # type: ignore[arg-type]
            for part in (_rows(content, n), dq, _rows(k, n), dk)
        ]
        D = _rotary_scores(*turned)
    if setting.sinusoids is not None:
        assert w.position_bias is not None
        asking = q + Scaled.plain(w.position_bias.expand_as(q.value))
        for part in (_rows(asking, n), dq):
            D = D + Scaled(by_offset(part.value, w, setting.sinusoids), part.log)
    D, ref = D * (1 / arch.divisor), ref * (1 / arch.divisor)
    if setting.bias is not None:
        D = D + Scaled.plain(setting.bias.expand(len(zero), -1, -1, -1))
    size = D.log_size()
    D, ref = _separated(D, ref, state.real)
    D, ref = D.normalised(), ref.normalised()
    # Beyond e^600 only which score is largest matters: cut both alike.
    cut = (torch.maximum(ref.log, D.log) - STEEPEST).clamp(min=0.0)
    return ref.at(cut), Scaled(D.value, D.log - cut), size


def _rows(x: Scaled, n: int) -> Scaled:
    return x.mapped(lambda t: t[:, :, None].expand(-1, -1, n, -1))


def _rotary_scores(q: Scaled, dq: Scaled, k: Scaled, dk: Scaled) -> Scaled:
    """All four products of common and deviating parts: under rotation none is constant along a row."""
    pairs = [(q, k), (dq, k), (q, dk), (dq, dk)]
    first, *others = [Scaled(a.value @ b.value.mT, a.log + b.log) for a, b in pairs]
    for other in others:
        first = first + other
    return first


def _separated(D: Scaled, ref: Scaled, real: Real) -> tuple[Scaled, Scaled]:
    """Move the last real row of D into ref, so that p is a row of P: rows that agree with it have D = 0."""
    index = real.last[:, None, None, None].expand(-1, D.value.shape[1], 1, D.value.shape[3])
    row = D.value.gather(2, index)  # [batch, head, 1, token]
    return Scaled(D.value - row, D.log), ref + Scaled(row[:, :, 0], D.log)


def split(
    ref: Float[Tensor, "batch head token"], D: Scaled, visible: Visible, real: Real
) -> tuple[Attention, Int[Tensor, "batch head 1"]]:
    """p, P - 1 p^T and j* from the scores `ref_j + D_ij` over what each row sees."""
    seen, alike = _reference(visible, real)
    hidden = ~seen[:, :, 0]
    log_p = (
        ref.masked_fill(hidden, -torch.inf).log_softmax(-1).nan_to_num(nan=-torch.inf)
    )  # [batch, head, token]
    p, top = log_p.exp(), log_p.argmax(-1, keepdim=True)
    # Rows that see alike differ by D alone, at its own scale; a mask's differences are of size one.
    level = torch.where(alike, D.log.clamp(max=0.0), torch.zeros_like(D.log))
    size = spread(level.clamp(min=-STEEPEST).exp(), D.value)  # below, expm1(D) is D and only the log goes on
    U = (D.value - D.value.gather(3, top[:, :, None].expand(-1, -1, D.value.shape[2], 1))).mul_(
        spread((D.log - level).clamp(max=STEEPEST).exp(), D.value)
    )  # D in units of size, zero in column j*
    U = _less_log_sum(U, size, log_p, p, top, visible)
    log_p = log_p.scatter(-1, top, -torch.inf)  # column j* follows from the others
    reach = (log_p[:, :, None] + (U * size).clamp(min=0.0)).masked_fill(~visible, -torch.inf)
    reach = torch.maximum(reach.flatten(1).amax(1), log_p.flatten(1).amax(1)) if U.numel() else level * 0
    reach = reach.clamp(min=LOWEST)
    weight = (log_p - spread(reach, log_p)).exp()[:, :, None]  # p in units of e^reach
    change = weight * torch.expm1((U * size).clamp(max=1.0)).div_(size)
    steep = (U * size) > 1
    if bool(steep.any()):
        grown = (log_p[:, :, None] + U * size - spread(reach, U)).clamp(max=STEEPEST).exp()
        change = torch.where(steep, (grown - weight) / size, change)
    change = (
        torch.where(visible, change, (-weight / size).expand_as(change)) if not _whole(visible) else change
    )
    change = change.masked_fill(~real.rows[:, None, :, None], 0.0) if not real.all else change
    rest = change.sum(-1, keepdim=True)  # column j* is zero still
    change = change.scatter(-1, top[:, :, None].expand(-1, -1, change.shape[2], 1), -rest)
    return Attention(p, Scaled(change, level + reach), visible), top


def _less_log_sum(
    U: Tensor, size: Tensor, log_p: Tensor, p: Tensor, top: Tensor, visible: Visible
) -> Float[Tensor, "batch head token token"]:
    """`U - log S` in units of size: `log1p(m)`, or where j* is not seen or m overflows a log-sum-exp."""
    others = p.scatter(-1, top, 0.0)[:, :, None]  # p without j*
    D = U * size
    E = torch.expm1(D.clamp(max=1.0)).div_(size)
    terms = others * E
    steep = D > 1
    if bool(steep.any()):
        terms = torch.where(steep, ((log_p[:, :, None] + D).exp() - others) / size, terms)
    if not _whole(visible):
        terms = torch.where(visible, terms, (-others / size).expand_as(terms))
    m = terms.sum(-1, keepdim=True)
    log_S = torch.log1p(m * size) / size
    at_top = visible.expand(-1, U.shape[1], -1, -1).gather(3, top[:, :, None].expand(-1, -1, U.shape[2], 1))
    lost = ~at_top | ~(m * size < 1e300) | ~(m * size > -1)
    if bool(lost.any()):
        whole = (log_p[:, :, None] + D).masked_fill(~visible, -torch.inf).logsumexp(-1, keepdim=True)
        log_S = torch.where(lost, whole.nan_to_num(neginf=0.0, posinf=0.0) / size, log_S)
    return U - log_S


def _whole(visible: Visible) -> bool:
    """Every token sees every token."""
    return bool(visible.all())


def _reference(
    visible: Visible, real: Real
) -> tuple[Bool[Tensor, "batch 1 1 token"], Bool[Tensor, " batch"]]:
    """What the reference row sees, and whether every real row of the sample sees just that."""
    first = real.first[:, None, None, None].expand(-1, 1, 1, visible.shape[-1])
    row = visible.gather(2, first)
    alike = ((visible == row).all(-1) | ~real.rows[:, None]).flatten(1).all(1)
    return torch.where(alike[:, None, None, None], row, real.rows[:, None, None]), alike

"""Attention of a state: the part of P that differs from row to row, and nothing else, acts on the deviation.

With X = 1 x^T + e^s R, query q_i = q + dq_i and key k_j = k + dk_j, a score splits into

    q_i . k_j = [constant along the row: drops out of the softmax] + [ref_j: the same in every row] + D_ij.

For plain heads `ref_j = q . dk_j` and `D_ij = dq_i . dk_j`, of order e^{2s}. With p = softmax(ref), D
centred so that `sum_j p_j D_ij = 0`, and `m_i = sum_j p_j expm1(D_ij) >= 0` (Jensen):

    P_ij - p_j = p_j (expm1(D_ij) - m_i) / (1 + m_i).

Rows of P sum to one, so `P X = 1 (x + e^s p^T R) + e^s (P - 1 p^T) R`: the common token moves to the
weighted mean, and the deviation is multiplied by P - 1 p^T. When e^{2s} leaves floating point's range,
expm1(D) is D and 2s goes into the scale. Masks give each row its own p_i over what it sees; positions put
terms of order one, and of order e^s, into D.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankscope.deviation.mlp import affine
from rankscope.deviation.scaled import STEEPEST, Scaled, spread
from rankscope.deviation.state import Real, State
from rankscope.nets.architecture import Architecture
from rankscope.nets.block import Setting
from rankscope.nets.kernels import masked_softmax
from rankscope.nets.positions import by_offset, rotate
from rankscope.nets.weights import Attention as AttentionWeights
from rankscope.nets.weights import Layer, Linear

STEEP = 300.0
"""D above which expm1 is not formed: such a row is sharp, and the plain difference is as good."""

Visible = Bool[Tensor, "batch 1 token token"]


@dataclass(frozen=True)
class Attention:
    """Attention of a layer in two parts: `P = 1 p^T + Delta`."""

    p: Float[Tensor, "batch head token"]
    Delta: Scaled  # [batch, head, token, token]

    def matrix(self) -> Float[Tensor, "batch head token token"]:
        """P as an ordinary tensor."""
        return self.p[:, :, None] + self.Delta.explicit()


def attention(
    arch: Architecture, index: int, layer: Layer, state: State, setting: Setting
) -> tuple[State, Attention]:
    """The attention branch of a state, and its attention."""
    w = layer.attention
    v, dv = heads(state.x, w.value, arch), deviations(state.R, w.value, arch)
    ref, D = scores(arch, w, state, setting)
    visible = setting.visible[arch.mask_of(index)].expand(len(state.real.rows), -1, -1, -1)
    P = split(ref, D, visible, state.real)
    # Rows of P sum to one: the common value passes, the deviation is averaged and differenced.
    mean = Scaled((P.p[:, :, None] @ dv.value)[:, :, 0], dv.log)  # [batch, head, head_width]
    spoken = Scaled(P.Delta.value @ dv.value, P.Delta.log + dv.log)  # [batch, head, token, head_width]
    x, R = v + mean, spoken
    if arch.kept_heads is not None:
        speaks = torch.zeros(arch.heads, 1, dtype=x.value.dtype, device=x.value.device)
        speaks[list(arch.kept_heads[index])] = 1.0
        x, R = x.mapped(lambda t: t * speaks), R.mapped(lambda t: t * speaks[:, None])
    out = Linear(w.output.weight.flatten(0, 1), w.output.bias)
    branch = State(
        affine(x.mapped(lambda t: t.flatten(1)), out),
        R.mapped(lambda t: t.transpose(1, 2).flatten(-2) @ out.weight),
        state.real,
    )
    return branch, P


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
) -> tuple[Float[Tensor, "batch head token"], Scaled]:
    """(ref_j, D_ij) after the divisor; what is constant along a row is left out."""
    n = state.real.rows.shape[1]
    zero = state.R.value.new_zeros(len(state.real.rows), arch.heads, n)
    if arch.kernel == "uniform":
        return zero, Scaled.plain(zero[..., None].expand(-1, -1, -1, n)).normalised()
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
    if arch.positions in ("relative", "rotary", "bias", "alibi"):
        D, ref = _separated(D, ref, state.real)
    return ref.explicit(), D.normalised()


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
    """Move the first real row of D into ref, and drop its first real column: D is left with what is neither
    constant along rows nor down columns, and is exactly zero where there is no such thing."""
    index = real.first[:, None, None, None].expand(-1, D.value.shape[1], 1, D.value.shape[3])
    row = D.value.gather(2, index)  # [batch, head, 1, token]
    rest = D.value - row
    column = rest.gather(3, index.mT[..., :1].expand(-1, -1, rest.shape[2], 1))
    return Scaled(rest - column, D.log), ref + Scaled(row[:, :, 0], D.log)


def split(ref: Float[Tensor, "batch head token"], D: Scaled, visible: Visible, real: Real) -> Attention:
    """p and P - 1 p^T from the scores `ref_j + D_ij` over what each row sees."""
    seen, alike = _reference(visible, real)
    p = masked_softmax(ref[:, :, None], seen)  # [batch, head, 1, token]
    together = bool(alike.all())
    base = p if together else masked_softmax(ref[:, :, None].expand_as(D.value), visible)
    level = D.log.clamp(max=STEEPEST)
    size = spread(level.clamp(min=-STEEPEST).exp(), D.value)  # below, expm1(D) is D and only the log goes on
    M = (D.value - _mean(base, D.value)) * size
    if not (real.all and together and bool(seen.all())):
        M = M.masked_fill_(~visible, 0.0)
    steep = M.amax(-1, keepdim=True) > STEEP if M.numel() else M > 0
    E = torch.expm1(M).div_(size)
    m = _mean(base, E)
    total = 1 + size * m  # at least one, unless D is so large that centring it left its rounding
    steep |= ~(total > 0.5)
    change = (E - m).mul_(base).div_(total)
    if bool(steep.any()):
        sharp = (masked_softmax(ref[:, :, None] + D.value * size, visible) - base) / size
        change = torch.where(steep, sharp, change)
    change = change if real.all else change.masked_fill_(~real.rows[:, None, :, None], 0.0)
    if together:
        return Attention(p[:, :, 0], Scaled(change, level))
    rows_alike = (visible == seen).all(-1, keepdim=True)
    apart = (base - p).masked_fill(rows_alike | ~real.rows[:, None, :, None], 0.0)
    log = torch.where(alike, level, level.clamp(min=0.0))
    Delta = apart * spread((-log).clamp(max=0.0).exp(), apart) + change * spread((level - log).exp(), change)
    return Attention(p[:, :, 0], Scaled(Delta, log))


def _mean(weights: Tensor, x: Tensor) -> Tensor:
    """`sum_j weights_ij x_ij`, the weights of one row or of all."""
    return x @ weights.mT if weights.shape[-2] == 1 else (weights * x).sum(-1, keepdim=True)


def _reference(
    visible: Visible, real: Real
) -> tuple[Bool[Tensor, "batch 1 1 token"], Bool[Tensor, " batch"]]:
    """What the reference row sees, and whether every real row of the sample sees just that."""
    first = real.first[:, None, None, None].expand(-1, 1, 1, visible.shape[-1])
    row = visible.gather(2, first)
    alike = ((visible == row).all(-1) | ~real.rows[:, None]).flatten(1).all(1)
    return torch.where(alike[:, None, None, None], row, real.rows[:, None, None]), alike

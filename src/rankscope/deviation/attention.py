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
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rankscope.deviation.mlp import affine
from rankscope.deviation.norms import normalise
from rankscope.deviation.scaled import LOWEST, STEEPEST, WIDEST, Logs, Scaled, saves_a_pass, spread
from rankscope.deviation.state import Real, State, doubtful
from rankscope.doubled import quotient
from rankscope.nets.architecture import Architecture
from rankscope.nets.norms import NormWeights
from rankscope.nets.positions import by_offset, rotate
from rankscope.nets.setting import Setting
from rankscope.nets.weights import Attention as AttentionWeights
from rankscope.nets.weights import Linear

Visible = Bool[Tensor, "batch 1 token token"]


@dataclass(frozen=True)
class Attention:
    """Attention of a layer in two parts: `P = 1 p^T + Delta`."""

    p: Float[Tensor, "batch head token"]
    others: Scaled  # [batch, head, token, token]
    """Delta but for column j*, which is left zero."""
    top: Int[Tensor, "batch head 1"]
    """j*, the largest entry of p."""
    visible: Visible
    size: Logs | None = None
    """The log of the largest score, known where the scores are."""
    signed: bool = False
    """Whether weights may be below zero, as those that a part of one's own has changed."""

    @cached_property
    def Delta(self) -> Scaled:
        """`P - 1 p^T`: its rows sum to zero, which gives column j*."""
        value = self.others.value
        column = self.top[:, :, None].expand(-1, -1, value.shape[2], 1)
        return Scaled(value.scatter(-1, column, -value.sum(-1, keepdim=True)), self.others.log)

    def matrix(self) -> Float[Tensor, "batch head token token"]:
        """P as an ordinary tensor."""
        P = self.p[:, :, None] + self.Delta.explicit()
        if self.signed:
            return P * self.visible.any(-1, keepdim=True)  # rows of padding stay zero
        return P.clamp(min=0.0) * self.visible


@dataclass(frozen=True)
class Spoken:
    """What the heads of a layer say, before the output projection: one common value each, and deviations."""

    x: Scaled  # [batch, head, head_width]
    R: Scaled  # [batch, token, head, head_width]
    output: Float[Tensor, "head head_width width"]
    doubt: Logs
    real: Real

    def contributions(self, real: Real) -> State:
        """What each head adds to the branch, as a state of batch * head samples."""
        heads = self.output.shape[0]
        x = torch.einsum("bhc,hcd->bhd", self.x.value, self.output)
        R = torch.einsum("bthc,hcd->bhtd", self.R.value, self.output)
        return State(
            Scaled(x.flatten(0, 1), self.x.log.repeat_interleave(heads)),
            Scaled(R.flatten(0, 1), self.R.log.repeat_interleave(heads)),
            Real(real.rows.repeat_interleave(heads, 0)),
            self.doubt.repeat_interleave(heads),
        ).tidy()


@dataclass(frozen=True)
class Values:
    """What heads mix: that of the common token, and the tokens' deviations from it."""

    x: Scaled  # [batch, head, head_width]
    R: Scaled  # [batch, head, token, head_width]
    doubt: Logs
    real: Real


def mixed(arch: Architecture, speaking: tuple[int, ...], output: Tensor, P: Attention, v: Values) -> Spoken:
    """Rows of P sum to one: the common value passes, the deviation is averaged and differenced, both about
    the token that most attend to."""
    dv = v.R
    most = dv.value.gather(
        2, P.top[..., None].expand(-1, -1, -1, dv.value.shape[-1])
    )  # [batch, head, 1, width]
    about = dv.value - most
    mean = Scaled((most + P.p[:, :, None] @ about)[:, :, 0], dv.log)  # [batch, head, head_width]
    R = Scaled(P.others.value @ about, P.others.log + dv.log)  # [batch, head, token, head_width]
    x = v.x + mean
    if len(speaking) < arch.heads:
        speaks = torch.zeros(arch.heads, 1, dtype=x.value.dtype, device=x.value.device)
        speaks[list(speaking)] = 1.0
        x, R = x.mapped(lambda t: t * speaks), R.mapped(lambda t: t * speaks[:, None])
    assert P.size is not None
    noise = _noise(v.doubt, P.size, P, Scaled(about, dv.log), dv)
    doubt = doubtful(v.doubt, noise - v.doubt, R.log_size())
    return Spoken(x, R.mapped(lambda t: t.transpose(1, 2)), output, doubt, v.real)


def _noise(doubt: Logs, size: Logs, P: Attention, about: Scaled, dv: Scaled) -> Logs:
    """log of the rounding in `(P - 1 p^T) R`: of values that P - 1 p^T weighs, whether or not they differ; of
    scores of that size, which move the weights p among values that differ; and of both at once."""
    weight = torch.linalg.vector_norm(P.others.value, ord=1, dim=-1)
    weight = weight.flatten(1).amax(1) if weight.numel() else torch.zeros_like(doubt)
    of_values = Scaled(weight[:, None], P.others.log).log_size() + doubt + dv.log_size()
    weigh = P.p.abs() if P.signed else P.p
    moved = Scaled(weigh[:, :, None] @ about.value.abs(), about.log).log_size()
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
    arch: Architecture, index: int, w: AttentionWeights, state: State, setting: Setting
) -> tuple[Float[Tensor, "batch head token"], Scaled, Logs]:
    """(ref_j, D_ij, log of the largest score) after the divisor; what is constant along a row is left out."""
    n = state.real.rows.shape[1]
    zero = state.R.value.new_zeros(len(state.real.rows), arch.heads, n)
    if arch.kernel == "uniform":
        D = Scaled.plain(zero[..., None].expand(-1, -1, -1, n)).normalised()
        return zero, D, D.log
    q, dq = heads(state.x, w.query, arch), deviations(state.R, w.query, arch)
    k, dk = heads(state.x, w.key, arch), deviations(state.R, w.key, arch)
    unsure = torch.zeros_like(state.doubt)
    if arch.query_norm:
        q, dq, of_queries = _normed(q, dq, w.query_norm, state, arch.norm_eps)
        k, dk, of_keys = _normed(k, dk, w.key_norm, state, arch.norm_eps)
        unsure = torch.maximum(of_queries, of_keys)
    ref = Scaled.plain(zero).normalised()  # zeros do not set the scale
    if arch.kernel == "gaussian":
        # -|k_j|^2 / 2 is the same in every row.
        ref = ref + Scaled(-(dk.value @ k.value[..., None])[..., 0], dk.log + k.log)
        ref = ref + Scaled(-dk.value.square().sum(-1) / 2, 2 * dk.log)
    content = q if w.content_bias is None else q + Scaled.plain(w.content_bias.expand_as(q.value))
    if not setting.rotary:
        ref = ref + Scaled((dk.value @ content.value[..., None])[..., 0], dk.log + content.log)
        D = Scaled(dq.value @ dk.value.mT, dq.log + dk.log)
    else:
        turned = [
            part.mapped(lambda t: rotate(t, setting.rotary_of(index), arch.rotary_pairs))
            for part in (_rows(content, n), dq, _rows(k, n), dk)
        ]
        D = _rotary_scores(*turned)
    if setting.sinusoids is not None:
        assert w.position_bias is not None
        asking = q + Scaled.plain(w.position_bias.expand_as(q.value))
        for part in (_rows(asking, n), dq):
            D = D + Scaled(by_offset(part.value, w, setting.sinusoids), part.log)
    share = quotient(1.0, arch.divisor, zero)
    D, ref = D * share, ref * share
    if setting.bias is not None:
        D = D + Scaled.plain(setting.bias.expand(len(zero), -1, -1, -1))
    size = D.log_size()
    D, ref = _separated(_within(D, size), ref, state.real)
    ref = ref.normalised()
    # Beyond e^600 only which score is largest matters: cut both alike.
    cut = (torch.maximum(ref.log, D.log) - STEEPEST).clamp(min=0.0)
    return ref.at(cut), Scaled(D.value, D.log - cut), size + unsure


def _normed(
    common: Scaled, deviation: Scaled, weights: NormWeights, state: State, eps: float
) -> tuple[Scaled, Scaled, Logs]:
    """Queries or keys through their own norm, head by head, and by how much it adds to the doubt."""
    number = common.value.shape[1]

    def apart(part: Scaled) -> Scaled:
        return Scaled(part.value.flatten(0, 1), part.log.repeat_interleave(number))

    def together(part: Scaled) -> Scaled:
        logs = part.log.view(-1, number)
        log = logs.amax(1)
        value = part.value.view(*logs.shape, *part.value.shape[1:])
        shrink = (logs - log[:, None]).exp()
        return Scaled(value * shrink.reshape(*shrink.shape, *[1] * (value.ndim - 2)), log)

    real = Real(state.real.rows.repeat_interleave(number, 0))
    doubt = state.doubt.repeat_interleave(number)
    done = normalise(State(apart(common), apart(deviation), real, doubt).tidy(), "rms", weights, eps)
    unsure = (done.doubt - doubt).clamp(min=0.0).view(-1, number).amax(1)
    return together(done.x), together(done.R), unsure


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


def _within(D: Scaled, size: Logs) -> Scaled:
    """D with its largest entry, known to be e^size, near one."""
    step = (size - D.log).masked_fill(size <= LOWEST, 0.0)
    if saves_a_pass(step, lambda: (step.abs() <= WIDEST).all()):
        return D
    return Scaled(D.value * spread((-step).exp(), D.value), D.log + step)


def split(
    ref: Float[Tensor, "batch head token"], D: Scaled, visible: Visible, real: Real, largest: Logs
) -> Attention:
    """p and P - 1 p^T from the scores `ref_j + D_ij` over what each row sees; `largest` is the
    log of the largest."""
    seen, alike = _reference(visible, real)
    log_p = ref.masked_fill(~seen[:, :, 0], -torch.inf).log_softmax(-1).nan_to_num(nan=-torch.inf)
    p, top = log_p.exp(), log_p.argmax(-1, keepdim=True)
    # Rows that see alike differ by D alone, at its own scale; a mask's differences are of size one.
    level = torch.where(alike, D.log.clamp(max=0.0), torch.zeros_like(D.log))
    size = spread(level.clamp(min=-STEEPEST).exp(), D.value)  # below, expm1(D) is D and only the log goes on
    U = D.value - D.value.gather(3, top[:, :, None].expand(-1, -1, D.value.shape[2], 1))
    U = U.mul_(spread((D.log - level).clamp(max=STEEPEST).exp(), U))  # D in units of size, zero in column j*
    log_others = log_p.scatter(-1, top, -torch.inf)  # column j* follows from the others
    rule = _steep if bool((U.flatten(1).amax(1) * size.flatten() > 1).any()) else _gentle
    change, reach = rule(U, size, log_p, log_others, top, visible)
    if not real.all:
        change = change.masked_fill_(~real.rows[:, None, :, None], 0.0)
    return Attention(p, Scaled(change, level + reach), top, visible, largest)


def _gentle(
    U: Tensor, size: Tensor, log_p: Tensor, log_others: Tensor, top: Tensor, visible: Visible
) -> tuple[Tensor, Logs]:
    """`p_j (expm1(D_ij) - m_i) / (1 + m_i)` where no score rises far above the reference row's."""
    reach = log_others.flatten(1).amax(1).clamp(min=LOWEST)
    weight = (log_others - spread(reach, log_others)).exp()[:, :, None]  # p in units of e^reach
    E = torch.expm1(U * size)
    E = E if saves_a_pass(size, lambda: (size == 1).all()) else E.div_(size)
    if not _whole(visible):
        E = torch.where(visible, E, -1 / size)
    m = E @ log_others.exp()[..., None]  # [batch, head, token, 1], in units of size
    if not bool(_seen_at(top, visible).all()):
        return _steep(U, size, log_p, log_others, top, visible)
    return E.sub_(m).mul_(weight).div_(1 + size * m), reach


def _steep(
    U: Tensor, size: Tensor, log_p: Tensor, log_others: Tensor, top: Tensor, visible: Visible
) -> tuple[Tensor, Logs]:
    """`p_j expm1(D_ij - log S_i)` with products of small p and large e^D formed as sums of their logs."""
    D = U * size
    others, weigh = log_others.exp()[:, :, None], log_p[:, :, None]
    terms = torch.where(D > 1, (weigh + D).exp() - others, others * torch.expm1(D.clamp(max=1.0))) / size
    terms = torch.where(visible, terms, -others / size).scatter(
        3, top[:, :, None].expand(-1, -1, U.shape[2], 1), 0.0
    )
    m = terms.sum(-1, keepdim=True) * size
    log_S = torch.log1p(m) / size
    lost = ~_seen_at(top, visible) | ~(m < 1e300) | ~(m > -1)  # j* is not seen, or the sum left the range
    whole = (weigh + D).masked_fill(~visible, -torch.inf).logsumexp(-1, keepdim=True)
    whole = whole.nan_to_num(neginf=0.0, posinf=0.0)
    log_S = torch.where(lost, whole / size, log_S)
    # log P as a log-softmax, where the largest score cancels exactly; no weight is above one.
    log_P = (weigh + D - torch.where(lost, whole, log_S * size)).clamp(max=0.0)
    log_P = log_P.masked_fill(log_others[:, :, None] == -torch.inf, -torch.inf)
    U = U - log_S
    D = U * size
    reach = torch.maximum(log_P, log_others[:, :, None]).masked_fill(~visible, -torch.inf)
    reach = torch.maximum(reach.flatten(1).amax(1), log_others.flatten(1).amax(1)).clamp(min=LOWEST)
    weight = (log_others - spread(reach, log_others)).exp()[:, :, None]  # p in units of e^reach
    grown = (log_P - spread(reach, D)).clamp(max=STEEPEST).exp()
    change = torch.where(D > 1, grown - weight, weight * torch.expm1(D.clamp(max=1.0))) / size
    return torch.where(visible, change, -weight / size), reach


def _seen_at(top: Tensor, visible: Visible) -> Bool[Tensor, "batch head token 1"]:
    """Whether each row sees j*."""
    rows = visible.expand(-1, top.shape[1], -1, -1)
    return rows.gather(3, top[:, :, None].expand(-1, -1, rows.shape[2], 1))


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

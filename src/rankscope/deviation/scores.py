"""Scores of a state, split into what all rows share and what they do not.

With X = 1 x^T + e^s R, query q_i = q + dq_i and key k_j = k + dk_j, a score is

    q_i . k_j = [constant along the row: drops out of the softmax] + [ref_j: the same in every row] + D_ij.

For plain heads `ref_j = q . dk_j` and `D_ij = dq_i . dk_j`, of order e^{2s}; of order e^s where keys are of a memory,
in cross-attention. Positions put terms of order one, and of order e^s, into D. The row of D whose entries are smallest
is the **reference row**: it goes into ref and is zero in D, so that no row is rounded at the size of a larger one.

**The linear kernel** has scores `log phi(q_i) . phi(k_j)`, `phi = elu + 1` (`log_weights`, and `whole_log_weights`
where positions rotate queries and keys). With `phi(q_i) = f (1 + r_i)` and `phi(k_j) = g (1 + t_j)`, entry by entry,
about those of the common token, shares `w_c = f_c g_c / f . g`, and means and covariances under these shares,

    log phi(q_i) . phi(k_j) = [constant along the row] + [ref_j = log1p(mean t_j)] + [D_ij = log1p(u_ij)],
    u_ij = cov(r_i, t_j) / ((1 + mean r_i) (1 + mean t_j)):

D is of order e^{2s}, as that of a softmax is. Nothing nearly equal is subtracted, in phi neither:

    phi(z + d) / phi(z) - 1 = d / (1 + z) | expm1(d) | (expm1(z + d) - z) / (1 + z) | (z + d - expm1(z)) e^-z

where both ends are above zero, both below, the second below, the first below. Where tokens are so far apart
that such a ratio leaves the range, weights are sums of logs instead.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from rankscope.deviation.activations import over
from rankscope.deviation.attention import EVERY, common_heads, deviation_heads
from rankscope.deviation.cap import CapReference, RowConstants, capped
from rankscope.deviation.decisions import piecewise
from rankscope.deviation.norms import normed
from rankscope.deviation.state import STEEPEST, PerturbTensor, Scaled, State, ValidTokens, largest_entry, spread
from rankscope.doubled import quotient
from rankscope.errors import ArchitectureError
from rankscope.nets import (
    Architecture,
    AttentionWeights,
    NormWeights,
    PassSettings,
    by_offset,
    kernel_of,
    linear_logs,
    rotate,
)
from rankscope.shapes import Float, Int

FAR = 150.0  # logs of ratios of phi from which on scores are formed as sums of logs
LARGE = 0.5  # the |u| above which log(1 + u) is taken as the log of 1 + u


def log_weights(q: Scaled, dq: Scaled, k: Scaled, dk: Scaled) -> tuple[Scaled, Scaled]:
    """Return `log phi(q_i) . phi(k_j)`, `phi = elu + 1`, as `(ref, D)`: ref_j + D_ij up to a constant of each row.

    Common queries q and keys k are `[batch, head, width]`, dq and dk what tokens add, `[batch, head, token, width]`.
    By the covariance of r_i and t_j (the module's docstring has the formula); of heads beyond FAR as sums of logs.
    """
    (Zq, Wq, r), (Zk, Wk, t) = _ratios(q, dq), _ratios(k, dk)
    share = (_log_phi(Zq) + _log_phi(Zk)).softmax(-1)  # [batch, head, 1, width]
    along, across = (part.mapped(lambda v: v @ share.mT) for part in (r, t))  # means, [batch, head, token, 1]
    logs = [_log_phi(W) - _log_phi(Z) for Z, W in ((Zq, Wq), (Zk, Wk))]  # of phi(z + d) / phi(z)
    F, G = (log.clamp(-FAR, FAR).exp() for log in logs)
    rows, columns = F @ share.mT, G @ share.mT  # 1 + mean r_i, 1 + mean t_j
    covariance = (r.value - along.value) * share @ (t.value - across.value).mT
    if share.shape[-1] == 1:  # weights are products of one number of i and one of j: rows are alike
        covariance = covariance * 0.0
    product = rows * columns.mT
    u = Scaled(covariance / product, r.log + t.log)
    ref, D = _log(across, columns).mapped(lambda v: v[..., 0]), _log(u, F * share @ G.mT / product)
    far = torch.stack([log.abs().flatten(2).amax(-1) for log in logs]).amax(0) > FAR  # [batch, head]

    def whole() -> tuple[Scaled, Scaled]:
        return Scaled(torch.zeros_like(ref.value), torch.zeros_like(ref.log)), whole_log_weights(Wq, Wk)

    return piecewise("linear.far", far, whole, (ref, D))


def whole_log_weights(q: Tensor, k: Tensor) -> Scaled:
    """The scores as sums of logs, of queries and keys `[batch, head, token, width]` as they are."""
    return Scaled(linear_logs(q, k), q.new_zeros(q.shape[:2])).normalised()


def _ratios(z: Scaled, d: Scaled) -> tuple[Tensor, Tensor, Scaled]:
    """Return z, z + d and `phi(z + d) / phi(z) - 1`, `phi = elu + 1`, by the four cases of the module's docstring.

    Where z or d is beyond float64's range, all are in units of `e^cut`, in which phi is linear or zero.
    """
    cut = (torch.maximum(z.log, d.log) - STEEPEST).clamp(min=0.0)  # there phi is linear or gone
    Z, step = z.at(cut)[:, :, None], Scaled(d.value, d.log - cut)
    D = step.explicit()
    W = Z + D
    high, up = Z >= 0, 1 + Z.clamp(min=0.0)
    down = (-Z).clamp(0.0, FAR).exp()
    below = over(torch.expm1(D.clamp(max=FAR)), D)
    inverse = 1 / D.masked_fill(D == 0, 1.0)
    crossing = torch.where(high, (torch.expm1(W.clamp(max=0.0)) - Z) / up, (W - torch.expm1(Z.clamp(max=0.0))) * down)
    alike = torch.where(high, 1 / up, below)
    slope = torch.where(high == (W >= 0), alike, crossing * inverse)
    return Z, W, Scaled(step.value * slope, step.log)


def _log_phi(z: Tensor) -> Tensor:
    """log(elu(z) + 1)."""
    return torch.where(z >= 0, torch.log1p(z.clamp(min=0.0)), z)


def _log(u: Scaled, ratio: Tensor) -> Scaled:
    """The log of 1 + u; where |u| is large, of `ratio`, which is 1 + u computed otherwise."""
    u = u.normalised()
    size = spread(u.log.clamp(-STEEPEST, STEEPEST).exp(), u.value)
    U = u.value * size
    near = u.value * over(torch.log1p(U.clamp(min=-LARGE)), U)
    return Scaled(torch.where(U.abs() > LARGE, ratio.log() / size, near), u.log)


HeadNorm = Callable[[Scaled, Scaled, NormWeights], tuple[Scaled, Scaled]]  # Of queries or keys, common part and rest


class Scores(NamedTuple):
    """Scores `ref_j + D_ij` after the divisor; what is constant along a row is left out."""

    ref: Scaled  # [batch, head, token]
    D: Scaled  # [batch, head, row, token]


@dataclass(frozen=True, eq=False)
class ScoreParts:
    """The queries, keys and positions that a layer's scores are made of; rows of D are made as they are
    needed, so that nothing of size token x token is held."""

    arch: Architecture
    w: AttentionWeights
    ref: Scaled  # [batch, head, token], before a cap
    rows: int
    heads: slice  # which heads of the layer these are
    products: tuple[tuple[Scaled, Scaled], ...] = ()
    """Pairs of queries and keys `[batch, head, token, head_width]`: D is the sum of their products."""
    offset: tuple[Scaled, ...] = ()  # the queries that are multiplied with relative positions, `sinusoids`
    sinusoids: Tensor | None = None
    bias: Callable[[slice], Tensor] | None = None  # gives what positions add to some rows, after the divisor
    constant: RowConstants | None = None  # the parts of scores that are constant along rows, under a cap
    gain: Float[Tensor, "batch 1"] | None = None
    """The factor of scores that grow with the number of tokens (`log_gain`), applied after the cap."""
    held: Scores | None = None  # all scores, for a kernel whose scores are no sum of products

    def scores(self, rows: slice = EVERY, about: CapReference | None = None) -> Scores:
        """`ref` and some rows of D. `about` matters under a cap: what these rows have in common with all others; if
        left out, with each other."""
        if self.held is not None:
            return Scores(self.held.ref, _some(self.held.D, rows))
        ref, D = self.ref, self.uncapped(rows)
        if (constant := self.constant) is not None:
            constant = constant.of(rows)
            reference = CapReference.of(constant, ref, [(EVERY, D)]) if about is None else about
            ref, D = capped(constant, ref, D, self.arch.score_cap, reference)
        if (gain := self.gain) is not None:
            ref, D = ref.mapped(lambda t: t * gain[..., None]), D.mapped(lambda t: t * gain[..., None, None])
        return Scores(ref, D.normalised())

    def before_cap(self, rows: slice = EVERY) -> Scaled | None:
        """Some rows of the whole scores before the cap, in caps; None without a cap."""
        if self.constant is None:
            return None
        c, r = (part.mapped(lambda t: t[..., None]) for part in self.constant.of(rows)[:2])
        full_scores = (c + r) + (self.ref.mapped(lambda t: t[:, :, None]) + self.uncapped(rows))
        return full_scores * quotient(1.0, self.arch.score_cap, self.ref.value)

    def cap_reference(self, blocks: Iterable[slice]) -> CapReference | None:
        """What blocks of rows that are made one by one have in common under a cap; None without a cap."""
        if self.constant is None:
            return None
        return CapReference.of(self.constant, self.ref, ((rows, self.uncapped(rows)) for rows in blocks))

    def uncapped(self, rows: slice = EVERY) -> Scaled:
        """Return some rows of D, the part of scores that depends on query and key, as if there were no cap.

        Without products (uniform attention) all scores are equal, `ref` is zero, and so is D.
        """
        if not self.products:
            count = len(range(*rows.indices(self.rows)))
            return Scaled(self.ref.value[:, :, None].expand(-1, -1, count, -1), self.ref.log)
        # Under rotation, all four products of common and deviating parts: none is constant along a row.
        D, *remaining = [Scaled(_some(a, rows).value @ b.value.mT, a.log + b.log) for a, b in self.products]
        for product in remaining:
            D = D + product
        for part in self.offset:
            assert self.sinusoids is not None
            at = by_offset(_some(part, rows).value, self.w, self.sinusoids, self.heads, rows.start or 0)
            D = D + Scaled(at, part.log)
        if type(D.value) is Tensor:  # as a part of the log it takes no pass; in doubled precision a log is too coarse
            D = Scaled(D.value, D.log - math.log(self.arch.divisor))
        else:
            D = Scaled(D.value.mul_(quotient(1.0, self.arch.divisor, self.ref.value)), D.log)
        if self.bias is not None:
            D = D + Scaled.plain(self.bias(rows).expand(len(D.value), -1, -1, -1)).by_head()
        return D.normalised() if self.constant is not None else D

    def narrowed(self, sample: slice, head: slice) -> "ScoreParts":
        """The parts of some samples and heads alone."""
        bias, at = self.bias, (sample, head)
        return replace(
            self,
            ref=self.ref[at],
            products=tuple((a[at], b[at]) for a, b in self.products),
            offset=tuple(part[at] for part in self.offset),
            bias=None if bias is None else lambda rows: bias(rows)[..., head, :, :],
            constant=self.constant and self.constant.narrowed(sample, head),
            heads=head,
        )


@dataclass(frozen=True, eq=False)
class StateHeads:
    """Queries and keys of a state, and the scores that a kernel makes of them (`ScoreOperations` of `nets`)."""

    arch: Architecture
    index: int  # the layer, from 0
    w: AttentionWeights
    state: State  # what queries are made of
    settings: PassSettings  # masks and positions; `bare` where keys are of a memory
    perturb: Callable[[Scaled], Scaled]  # moves the last digits of queries and keys, in a second pass
    perturb_tensor: PerturbTensor | None  # moves those of tensors inside their norm
    keys: State  # what keys are made of: the same tokens, or a memory
    bias: Callable[[slice], Tensor] | None = None  # makes rows of what positions add, if the settings hold none

    def parts(self) -> ScoreParts:
        """The parts of the layer's scores, by the deviation rule of its kernel."""
        kernel = kernel_of(self.arch.kernel)
        if kernel.deviation is None:
            sentence = f"kernel {kernel.name} must have a rule in deviation arithmetic to be used in it; it has none"
            remedy = "use arithmetic='float64', or give Kernel(deviation=...)"
            raise ArchitectureError(f"{sentence}: {remedy}", subject="kernel")
        return cast(ScoreParts, kernel.deviation(self))

    @cached_property
    def zero(self) -> Tensor:
        """A tensor of zeros `[batch, head, token]`."""
        shape = len(self.state.valid.mask), self.arch.heads, self.keys.valid.mask.shape[1]
        return self.state.R.value.new_zeros(*shape)

    @property
    def rows(self) -> int:
        """The number of queries of each sample."""
        return self.state.valid.mask.shape[1]

    @cached_property
    def split_heads(self) -> tuple[Scaled, Scaled, Scaled, Scaled]:
        """Queries q and dq, keys k and dk: of the common token, and what tokens add to it."""
        arch, w, state, keys, perturb = self.arch, self.w, self.state, self.keys, self.perturb
        q, dq, k, dk = (
            perturb(project(part, linear, arch).by_head())
            for linear, of in ((w.query, state), (w.key, keys))
            for project, part in ((common_heads, of.x), (deviation_heads, of.R))
        )
        if arch.query_norm:
            valid, eps, moves = state.valid, arch.norm_eps, self.perturb_tensor
            norm: HeadNorm = partial(normed_heads, valid=valid, eps=eps, perturb=moves)
            norm = partial(normed_across, norm) if arch.query_norm_across else norm
            (q, dq), (k, dk) = norm(q, dq, w.query_norm), norm(k, dk, w.key_norm)
        return q, dq, k, dk

    def _zero_ref(self) -> Scaled:
        return Scaled.plain(self.zero).by_head()  # zeros do not set the scale

    def equal(self) -> ScoreParts:
        """Scores that are equal everywhere, of uniform attention."""
        return ScoreParts(self.arch, self.w, self._zero_ref(), self.rows, EVERY)

    def given(self, ref: Scaled, D: Scaled) -> ScoreParts:
        """Scores `ref_j + D_ij` as they are."""
        return ScoreParts(self.arch, self.w, ref, self.rows, EVERY, held=Scores(ref, D))

    def feature_products(self) -> ScoreParts:
        """`log f(q_i) . f(k_j)`, `f = elu + 1` (`scores.py`)."""
        q, dq, k, dk = self.split_heads
        if not self.settings.rotary:
            return self.given(*log_weights(q, dq, k, dk))
        rotated = [self._rotated(_rows(c, self.rows) + d) for c, d in ((q, dq), (k, dk))]
        Q, K = (Scaled(part.value, part.log.clamp(max=STEEPEST)).explicit() for part in rotated)
        return self.given(self._zero_ref(), whole_log_weights(Q, K).normalised())

    def distances(self) -> ScoreParts:
        """`-|q_i - k_j|^2 / (2 divisor)`, positions and gain: `-|k_j|^2 / 2` is the same in every row, and
        rotations keep lengths, but for their scale."""
        _, _, k, dk = self.split_heads
        long, dlong = (part.mapped(lambda t: _stretched(self.arch, self.index, t)) for part in (k, dk))
        ref = self._zero_ref()
        ref = ref + Scaled(-(dlong.value @ long.value[..., None])[..., 0], dlong.log + long.log)
        return self.products(ref + Scaled(-dlong.value.square().sum(-1) / 2, 2 * dlong.log))

    def products(self, ref: Scaled | None = None) -> ScoreParts:
        """`q_i . k_j / divisor`, positions, cap and gain; `ref` is added to every row before the divisor."""
        arch, w, settings, zero, n = self.arch, self.w, self.settings, self.zero, self.rows
        q, dq, k, dk = self.split_heads
        ref = self._zero_ref() if ref is None else ref
        content = q if w.content_bias is None else q + Scaled.plain(w.content_bias.expand_as(q.value)).by_head()
        share = quotient(1.0, arch.divisor, zero)
        c, r = ref.mapped(lambda t: t[..., :1] * 0.0), dq.mapped(lambda t: t[..., 0] * 0.0)
        products: tuple[tuple[Scaled, Scaled], ...] = ((dq, dk),)
        if not settings.rotary:
            if arch.score_cap:  # elsewhere what is constant along rows drops out
                c = Scaled((content.value * k.value).sum(-1, keepdim=True), content.log + k.log)
                r = Scaled((dq.value @ k.value[..., None])[..., 0], dq.log + k.log)
            ref = ref + Scaled((dk.value @ content.value[..., None])[..., 0], dk.log + content.log)
            broken = (k.value - k.value).sum(-1).isnan()  # k drops out of the softmax; a NaN in it does not
            ref = ref.mapped(lambda t: t.masked_fill(broken[..., None], torch.nan))
        else:
            asks, moves, answers, differs = (self._rotated(part) for part in (_rows(content, n), dq, _rows(k, n), dk))
            products = ((asks, answers), (moves, answers), (asks, differs), (moves, differs))
        offset: tuple[Scaled, ...] = ()
        if settings.sinusoids is not None:
            assert w.position_bias is not None
            offset = (_rows(q + Scaled.plain(w.position_bias.expand_as(q.value)).by_head(), n), dq)
        held = settings.bias
        bias = self.bias if held is None else lambda rows: held[..., rows, :]
        gain = arch.log_gain * self.keys.valid.count.to(zero).log() if arch.log_gain else None  # [batch, 1]
        constant, ref = None, ref * share
        if arch.score_cap:
            ref, c, r = (part.normalised() for part in (ref, c * share, r * share))
            constant = RowConstants(c, r, self.state.valid.mask, self.keys.valid.mask)
        return ScoreParts(arch, w, ref, n, EVERY, products, offset, settings.sinusoids, bias, constant, gain=gain)

    def _rotated(self, part: Scaled) -> Scaled:
        tables = self.settings.rotary_of(self.index)
        return part.mapped(lambda t: rotate(t, tables, self.arch.rotary_pairs))


def _some(x: Scaled, rows: slice) -> Scaled:
    """Some rows of numbers `[batch, head, row, ...]`."""
    return x if rows == EVERY else x.mapped(lambda t: t[:, :, rows])


def _stretched(arch: Architecture, index: int, t: Tensor) -> Tensor:
    """Keys as long as they are after rotation, which may scale a part of their width."""
    scale, width = arch.rotary_scale_of(index), arch.rotary_width
    return t if scale == 1.0 else torch.cat([t[..., :width] * scale, t[..., width:]], -1)


def normed_heads(
    common: Scaled,
    deviation: Scaled,
    weights: NormWeights,
    valid: ValidTokens,
    eps: float,
    perturb: PerturbTensor | None,
) -> tuple[Scaled, Scaled]:
    """Queries, keys or head outputs through an RMSNorm of each head.

    Args:
        common: That of the common token, `[batch, head, width]`.
        deviation: What tokens add to it, `[batch, head, token, width]`.
        weights: The gain of the norm.
        valid: Which positions are tokens.
        eps: What the norm adds to mean squares.
        perturb: Moves the last digits of results, in a second pass.
    """
    shape = common.value.shape
    valid = valid.of_heads(shape[1])
    result = State(common.heads_as_samples(), deviation.heads_as_samples(), valid).tidy()
    result = normed(result, "rms", weights, eps, perturb)
    if perturb is not None:
        result = State(result.x.mapped(perturb), result.R.mapped(perturb), valid)
    result = result.tidy()
    return result.x.samples_as_heads(shape), result.R.samples_as_heads(shape)


def normed_across(norm: HeadNorm, common: Scaled, deviation: Scaled, weights: NormWeights) -> tuple[Scaled, Scaled]:
    """Queries or keys through one RMSNorm of all heads together: by `norm`, that of each head, as if they were one.

    Keys that several queries share are there as often as they are used, which leaves mean squares as they are."""
    heads, width = common.value.shape[1], common.value.shape[-1]
    assert weights.gain is not None
    gain = weights.gain.view(-1, width).repeat_interleave(heads * width // len(weights.gain), 0).flatten()

    def as_one(part: Scaled) -> Scaled:
        part = part.together().mapped(lambda t: (t.transpose(1, 2) if t.ndim == 4 else t).flatten(-2)[:, None])
        return Scaled(part.value, part.log[:, None])

    def apart(part: Scaled) -> Scaled:
        value = part.value[:, 0].view(*part.value[:, 0].shape[:-1], heads, width)
        return Scaled(value.transpose(1, 2) if value.ndim == 4 else value, part.log[:, 0]).by_head()

    x, R = norm(as_one(common), as_one(deviation), NormWeights(gain))
    return apart(x), apart(R)


def _rows(x: Scaled, n: int) -> Scaled:
    """Numbers of the common token `[batch, head, width]` repeated for n tokens."""
    return x.mapped(lambda t: t[:, :, None].expand(-1, -1, n, -1))


class ReferencedScores(NamedTuple):
    """Scores `ref_j + D_ij` with D zero in the reference row."""

    ref: Float[Tensor, "batch head token"]
    D: Scaled  # [batch, head, token, token]
    row: Int[Tensor, "batch head"]  # the index of the reference row
    fine: Scaled  # ref with a log-scale of its own


def about_reference_row(
    scores: Scores, valid: ValidTokens, *, tokens: bool = True, in_place: bool = False
) -> ReferencedScores:
    """Scores with the reference row, the row of D whose entries are smallest, moved from D into ref. Columns
    are `tokens`, of which only valid ones count, or something else, as experts. With `in_place` nobody else reads
    these scores."""
    ref, D = scores
    if not D.value.numel():
        return ReferencedScores(ref.value, D, D.log.long(), ref)
    entries = D.value if valid.all or not tokens else D.value.masked_fill(~valid.mask[:, None, None], 0.0)
    size = largest_entry(entries, 3)  # [batch, head, token]
    row = size.masked_fill(~valid.mask[:, None], torch.inf).argmin(-1)
    moved = D.value.gather(2, row[..., None, None].expand(-1, -1, 1, D.value.shape[3]))
    in_place = in_place and type(D.value) is Tensor and D.value.is_contiguous()
    D = Scaled(D.value.sub_(moved) if in_place else D.value - moved, D.log)
    ref = (ref + Scaled(moved[:, :, 0], D.log)).normalised()
    # Beyond e^600 only which score is largest matters: cut both alike.
    cut = (torch.maximum(ref.log, D.log) - STEEPEST).clamp(min=0.0)
    return ReferencedScores(ref.at(cut), Scaled(D.value, D.log - cut), row, Scaled(ref.value, ref.log - cut))

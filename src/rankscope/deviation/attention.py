"""The attention pattern of a state, and what its heads make of the values.

Rows of the pattern P sum to one, so with X = 1 x^T + e^s R and p the reference row of P (`softmax.py`)

    P X = 1 (x + e^s p^T R) + e^s (P - 1 p^T) R:

the common token moves to the weighted mean, and the deviation is multiplied by Delta = P - 1 p^T, the part of
P that differs from row to row. Deviations are taken from that of token j*, j* the largest entry of p: then
column j* of Delta, of which sharp attention leaves only the rounding of 1 - p_j*, takes no part.

Called by `rules.py` in this order: `common_heads` and `deviation_heads` project a state to values (and in
`scores.py` to queries and keys), `softmax.py` makes the `DeviationPattern` of the scores, `mixed` applies it,
`gated` multiplies the result with gates.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from rankscope.deviation.activations import tanh_change, tanh_difference
from rankscope.deviation.decisions import piecewise
from rankscope.deviation.mlp import affine, product, rows
from rankscope.deviation.state import Entries, LogScales, Scaled, State, ValidTokens, as_tensor
from rankscope.nets import Architecture, Linear, TokenOrder, log_sigmoid
from rankscope.shapes import Bool, Float, Int

Visible = Bool[Tensor, "batch 1 row token"]
EVERY = slice(None)  # all rows of a pattern
SHORT = 0.01  # a head's output for a token below this share of the mean output is not formed as mean plus deviation


@dataclass(frozen=True)
class Logits:
    """The scores `ref_j + D_ij` whose softmax is P, small entries of P as exact as large ones."""

    ref: Float[Tensor, "batch head token"]
    D: Scaled  # [batch, head, row, token]
    fine: Scaled | None = None  # ref with a log-scale of its own, however small it is; None if only P is needed

    @property
    def reference(self) -> Scaled:
        """`fine`, which every pattern made by `softmax.split` has."""
        assert self.fine is not None
        return self.fine

    def softmax(self, visible: Visible) -> Float[Tensor, "batch head row token"]:
        """The pattern P as an ordinary tensor, over the columns visible to each row."""
        scores = self.ref[:, :, None] + self.D.explicit()
        return scores.masked_fill(~visible, -torch.inf).softmax(-1).masked_fill(~visible, 0.0)  # padding sees nothing

    def log_softmax(self, visible: Visible) -> Float[Tensor, "batch head row token"]:
        """log P as an ordinary tensor, over the columns visible to each row; -inf elsewhere."""
        scores = self.ref[:, :, None] + self.D.explicit()
        return scores.masked_fill(~visible, -torch.inf).log_softmax(-1).masked_fill(~visible, -torch.inf)


class Pattern(ABC):
    """The attention pattern of a layer in two parts, `P = 1 p^T + Delta`, p one of its rows: held (`DeviationPattern`),
    or with rows that are made as they are used (`by_rows.PatternByRows`).

    Rows are queries (tokens); columns are keys: tokens, or in cross-attention those of the memory."""

    p: Float[Tensor, "batch head token"]  # the row that all rows are compared with
    top: Int[Tensor, "batch head 1"]  # j*, the column of the largest entry of p
    signed: bool = False  # True if entries may be negative, as after a part of the user's own changed them
    total: Float[Tensor, "*batch #head"] | None = None
    """What p sums to, and every row too but for its `row_excess`; None means one."""
    row_excess: Scaled | None = None  # [batch, head, row]
    """By how much the sum of each row exceeds `total`; None means that all rows sum to `total`."""
    scaled_p: Scaled | None = None  # [batch, head, token]
    """p with a log-scale of its own, if it may be smaller than float64 reaches; None means p itself."""

    @abstractmethod
    def delta_times(self, V: Float[Tensor, "batch head token width"]) -> Scaled:
        """The product `Delta V`, for a V whose row j* is zero."""

    def times(self, V: Float[Tensor, "batch head token width"]) -> Float[Tensor, "batch head row width"]:
        """The product `P V` as ordinary tensors."""
        return self.of_rows(lambda rows: self.matrix(rows) @ V, V.shape[-1])

    @abstractmethod
    def matrix(self, rows: slice = EVERY) -> Float[Tensor, "batch head row token"]:
        """The pattern P as an ordinary tensor, or some rows of it."""

    @abstractmethod
    def of_rows(self, compute: Callable[[slice], Tensor], *shape: int) -> Float[Tensor, "batch head row ..."]:
        """Numbers of all rows, where `compute` gives `[batch, head, row, *shape]` of some."""

    @abstractmethod
    def visible_blocks(self) -> Iterator[Visible]:
        """What each row sees, some rows after the others."""


@dataclass(frozen=True)
class DeviationPattern(Pattern):
    """An attention pattern that is held."""

    p: Float[Tensor, "batch head token"]
    off_top: Scaled  # [batch, head, row, token]; Delta without column j*, which is zero here
    top: Int[Tensor, "batch head 1"]
    visible: Visible  # which tokens each row sees
    logits: Logits | None = None  # the scores that P is the softmax of; None if P was not made of scores
    signed: bool = False
    total: Float[Tensor, "*batch #head"] | None = None
    row_excess: Scaled | None = None
    scaled_p: Scaled | None = None
    before_cap: Scaled | None = None  # [batch, head, row, token]
    """The scores before the cap, in caps; None if there is no cap."""

    @cached_property
    def Delta(self) -> Scaled:
        """`P - 1 p^T`, all heads of a sample at one scale; column j* follows from the row sums."""
        return self.by_head.together()

    @property
    def by_head(self) -> Scaled:
        """`P - 1 p^T`, each head at a scale of its own."""
        return with_top_column(self.off_top, self.top, self.row_excess)

    @property
    def log(self) -> LogScales:
        """The log of the largest |entry| of Delta, by head."""
        return self.by_head.log_size()

    def visible_blocks(self) -> Iterator[Visible]:
        """What each row sees, all in one block."""
        yield self.visible

    def delta_times(self, V: Float[Tensor, "batch head token width"]) -> Scaled:
        """The product `Delta V`, from all rows at once."""
        return Scaled(self.off_top.value @ V, self.off_top.log)

    def matrix(self, rows: slice = EVERY) -> Float[Tensor, "batch head row token"]:
        """The pattern P as an ordinary tensor, or some rows of it."""
        return self._matrix[:, :, rows]

    def log_matrix(self, rows: slice = EVERY) -> Float[Tensor, "batch head row token"]:
        """log P as an ordinary tensor, or some rows of it, for a pattern that has scores."""
        assert self.logits is not None
        return self.logits.log_softmax(self.visible)[:, :, rows]

    def of_rows(self, compute: Callable[[slice], Tensor], *shape: int) -> Float[Tensor, "batch head row ..."]:
        """Numbers of all rows at once."""
        return compute(EVERY)

    def farthest(self, compute: Callable[[slice], Tensor]) -> Float[Tensor, "batch head"]:
        """The largest number over all rows, where `compute` gives `[batch, head, row, token]` of some rows."""
        return compute(EVERY).amax((-2, -1))

    @property
    def score_sizes(self) -> tuple[LogScales, LogScales] | None:
        """(largest |ref|, log of the largest |D|) of each head's scores `ref_j + D_ij`; None without scores."""
        return None if self.logits is None else (largest_score(self.logits.ref), self.logits.D.log_size())

    @property
    def largest_before_cap(self) -> LogScales | None:
        """The log of the largest score before the cap, in caps, by head; None if there is no cap."""
        return None if self.before_cap is None else self.before_cap.log_size()

    def deciding(self, rows: slice = EVERY) -> Float[Tensor, "batch head row token"]:
        """The numbers that say which tokens are attended to, for a pattern that has scores: log P, or under a cap the
        scores before it, in caps; one value where a row does not see."""
        if self.before_cap is not None:
            return self.before_cap.explicit().masked_fill(~self.visible, 0.0)[:, :, rows]
        return self.log_matrix(rows)

    def restored(self, order: TokenOrder, *, of_memory: bool = False) -> "DeviationPattern":
        """The pattern with tokens in their original order, padding included; those of a memory were not moved."""
        square, columns, top, logits = order.restored_square, order.restored_columns, self.top, self.logits
        if of_memory:
            square, columns = order.restored_rows, lambda p: p
        else:
            top = order.forth.gather(1, top.flatten(1)).view_as(top)
        if logits is not None:
            fine = logits.fine and logits.fine.mapped(columns)
            logits = Logits(columns(logits.ref), logits.D.mapped(square), fine)
        return replace(
            self,
            p=columns(self.p),
            off_top=self.off_top.mapped(square),
            top=top,
            visible=square(self.visible),
            logits=logits,
            row_excess=self.row_excess and self.row_excess.mapped(order.restored_columns),
            scaled_p=self.scaled_p and self.scaled_p.mapped(columns),
            before_cap=self.before_cap and self.before_cap.mapped(square),
        )

    @cached_property
    def _matrix(self) -> Float[Tensor, "batch head row token"]:
        if self.logits is not None and not self.signed:
            return self.logits.softmax(self.visible)
        P = self.p[:, :, None] + self.Delta.explicit()
        return P * self.visible.any(-1, keepdim=True)  # rows of padding stay zero


def largest_score(ref: Float[Tensor, "batch head token"]) -> Float[Tensor, "batch head"]:
    """The largest |score| of the reference row of each head that is a number."""
    return ref.masked_fill(ref.isinf(), 0.0).abs().amax(-1)


def with_top_column(off_top: Scaled, top: Int[Tensor, "batch head 1"], sums: Scaled | None = None) -> Scaled:
    """Rows with column j* filled in, so that they sum to zero, or to `sums`; `off_top` has zeros there."""
    value = off_top.value
    column = top[:, :, None].expand(-1, -1, value.shape[2], 1)
    if sums is not None:
        last = off_top.mapped(lambda t: -t.sum(-1, keepdim=True)) + sums.mapped(lambda t: t[..., None])
        rest = off_top.mapped(lambda t: t.scatter(-1, column, 0.0))
        return rest + last.mapped(lambda t: torch.zeros_like(value).scatter(-1, column, t))
    return Scaled(value.scatter(-1, column, -value.sum(-1, keepdim=True)), off_top.log)


@dataclass(frozen=True)
class Values:
    """The values of a layer's heads: those of the common token, and the tokens' deviations from them."""

    x: Scaled  # [batch, head, head_width]
    R: Scaled  # [batch, head, token, head_width]
    valid: ValidTokens


@dataclass(frozen=True)
class HeadOutputs(Values):
    """The outputs of a layer's heads before the output projection: one common to all tokens, and deviations."""

    output: Float[Tensor, "head head_width width"]  # the output projection

    def contributions(self, valid: ValidTokens) -> State:
        """What each head adds to the attention branch, as a state of batch * head samples."""
        x = self.x.mapped(lambda t: torch.einsum("bhc,hcd->bhd", t, self.output))
        R = self.R.mapped(lambda t: torch.einsum("bhtc,hcd->bhtd", t, self.output))
        return State(x.heads_as_samples(), R.heads_as_samples(), valid.of_heads(len(self.output))).tidy()


def mixed(arch: Architecture, active_heads: tuple[int, ...], output: Tensor, P: Pattern, v: Values) -> HeadOutputs:
    """The outputs of the heads, `P V` with V = 1 x^T + R the values `v`.

    With r the row j* of R: P V = 1 (x + r + p^T (R - 1 r^T)) + Delta (R - 1 r^T), if rows of P sum to one.
    Where they sum to `P.total`, so much of x and r is taken; where a row sums to more, by `P.row_excess`, its
    token has so much more of them.

    Where the output of a token is far below the mean (it attends to short values, the others to long ones),
    mean plus deviation would be rounding: there `P V` is taken as it stands, without a common part. Heads
    that are not in `active_heads` give zero; `output` is the output projection."""
    dv = v.R
    top_row = dv.value.gather(2, P.top[..., None].expand(-1, -1, -1, dv.value.shape[-1]))  # [batch, head, 1, width]
    from_top = dv.value - top_row
    total, shared, excess = P.total, P.scaled_p, P.row_excess
    kept = top_row if total is None else top_row * total[..., None, None]
    if shared is None:
        mean = _in_range(Scaled((kept + P.p[:, :, None] @ from_top)[:, :, 0], dv.log))  # [batch, head, head_width]
    else:
        mean = Scaled((shared.value[:, :, None] @ from_top)[:, :, 0], shared.log + dv.log).normalised()
        mean = mean + Scaled(kept[:, :, 0], dv.log).normalised()
    R = P.delta_times(from_top)  # [batch, head, token, head_width]
    R = _in_range(Scaled(R.value, R.log + dv.log))
    if excess is not None:
        common = Scaled(top_row, dv.log).normalised() + v.x.mapped(lambda t: t[:, :, None])
        R = R + product(excess.mapped(lambda t: t[..., None]), common)
    # zeros do not set the scale
    x = (v.x if total is None else v.x.mapped(lambda t: t * total[..., None]).normalised()) + mean
    if not P.signed:
        short = _short(P, dv, mean, v.valid)
        x, R = piecewise("attention.short", short, lambda: (v.x, Scaled(P.times(dv.value), dv.log)), (x, R))
    if len(active_heads) < arch.heads:
        active = marked(active_heads, arch.heads, x.value)
        x, R = x.mapped(lambda t: t * active), R.mapped(lambda t: t * active[:, None])
    return HeadOutputs(x.normalised(), R.normalised(), v.valid, output)


def marked(heads: Collection[int], count: int, like: Tensor) -> Float[Tensor, "head 1"]:
    """One for these heads of `count`, zero for the others."""
    flags = torch.zeros(count, 1, dtype=like.dtype, device=like.device)
    for head in heads:  # a list of them would have to cross to where the heads are
        flags[head] = 1.0
    return flags


FAINTEST = 1e-290  # sums of weights below this have lost digits: float64 has fewer of them below 1e-308


def _in_range(heads: Scaled) -> Scaled:
    """Outputs of heads, zero where all of a head's are so small that weights of attention had lost their digits: of
    zeros `proved_zeros.py` asks whether they are exact."""
    lost = ~(heads.largest() >= FAINTEST)  # NaN stays NaN
    return piecewise("attention.in_range", lost, lambda: heads.mapped(lambda t: t * 0.0), heads)


def _short(P: Pattern, dv: Scaled, mean: Scaled, valid: ValidTokens) -> Bool[Tensor, "batch head"]:
    """True for heads where values that some token attends to are on average below a hundredth of the mean output."""
    sizes = torch.linalg.vector_norm(dv.value, dim=-1, keepdim=True)  # [batch, head, token, 1]
    least, most = sizes.amin((2, 3)), sizes.amax((2, 3))

    def on_average() -> Tensor:
        attended = P.times(sizes)[..., 0].masked_fill(~valid.mask[:, None], torch.inf)
        return attended.amin(-1) < SHORT * torch.linalg.vector_norm(mean.value, dim=-1)

    uneven = least < SHORT * most
    return piecewise("attention.lengths", uneven, on_average, torch.zeros_like(uneven))


def common_heads(x: Scaled, linear: Linear, arch: Architecture) -> Scaled:
    """The common token projected to queries, keys or values, bias included: `[batch, head, head_width]`."""
    flat = Linear(linear.weight.flatten(1), None if linear.bias is None else linear.bias.flatten())
    count, width = linear.weight.shape[1:]
    return affine(x, flat).mapped(lambda t: _grouped(t.view(len(t), count, width), arch.heads))


def deviation_heads(R: Scaled, linear: Linear, arch: Architecture) -> Scaled:
    """The tokens' deviations projected to queries, keys or values: `[batch, head, token, head_width]`."""
    count, width = linear.weight.shape[1:]
    flat = linear.weight.flatten(1)
    # Products of heads would copy them each time if they were not laid out by head.
    heads = R.mapped(lambda t: (t @ flat).view(*t.shape[:2], count, width).transpose(1, 2).contiguous())
    return heads.mapped(lambda t: _grouped(t, arch.heads))


def _grouped(t: Tensor, count: int) -> Tensor:
    """Key heads `[batch, key head, ...]` repeated to `count` heads, where several queries share one."""
    return t if t.shape[1] == count else t.repeat_interleave(count // t.shape[1], 1)


CLOSING = 14.0  # the log by which a gate may lie below another's before tokens are taken by themselves
SHUT = -300.0  # where the largest gate of the common token has a log below this, that log goes into the scale


def gated(heads: HeadOutputs, z: Scaled, d: Scaled) -> HeadOutputs:
    """The outputs of the heads times the gates g_i = s(z + d_i), s the sigmoid: z `[batch, head, head_width]` is
    the gates' input for the common token, d `[batch, head, token, head_width]` what tokens add to it.

    With y_i = x + R_i the outputs before, and a the token whose output is nearest to x,

        g_i y_i = g_a y_a + (g_i - g_a) y_i + g_a (R_i - R_a):

    the common token, which may be none of them, has no gate. Every entry has a scale of its own until all are
    multiplied: a gate may be open where outputs are zero, and gates of e^-1000 are all that is left."""
    z, d = (part if part.log.ndim > 1 else part.by_head() for part in (z, d))
    shape = heads.R.value.shape
    z, d, x, R = (part.heads_as_samples() for part in (z, d, heads.x, heads.R))
    valid = heads.valid.of_heads(shape[1]).mask[..., None]
    distances = R.value.abs().amax(-1, keepdim=True).masked_fill(~valid, torch.inf)
    nearest = distances.argmin(1, keepdim=True)  # [sample, 1, 1]: a

    def of_nearest(t: Tensor) -> Tensor:
        return t.gather(1, nearest.expand(-1, 1, t.shape[2]))

    logits = as_tensor(rows(z) + d)
    gates = Entries(torch.ones_like(logits), log_sigmoid(logits))
    outputs = Entries.of(rows(x)) + Entries.of(R)
    step, apart = (part.mapped(lambda t: t - of_nearest(t)) for part in (d, R))
    # s(z) is (1 + tanh(z / 2)) / 2.
    change = tanh_difference(of_nearest(logits) / 2, logits / 2, step * 0.5, 0.5)
    tokens, gate = gates * outputs, gates.mapped(of_nearest)
    common, rest = tokens.mapped(of_nearest), change * outputs + gate * Entries.of(apart)
    # Where a token or its gate is far below those of a, the sum would leave rounding of them: tokens by themselves.
    below = (gates.log < gate.log - CLOSING) | (tokens.log < common.log - CLOSING) | (common.sign == 0)
    alone = (below & valid).any(1, keepdim=True)
    rest = rest.or_(tokens, alone)
    new_x = common.within(~alone).mapped(lambda t: t[:, 0])
    x, R = new_x.samples_as_heads(shape), rest.within(valid).samples_as_heads(shape)
    return HeadOutputs(x, R, heads.valid, heads.output)


def sigmoid(z: Scaled, d: Scaled) -> tuple[Scaled, Scaled]:
    """(s(z), s(z + d) - s(z)) of the sigmoid s (the attention kernel of that name has no rule): z of the common token
    `[batch, head, unit]`, d what tokens add to it `[batch, head, token, unit]`.

    s(z) is (1 + tanh(z / 2)) / 2, and of tanh the difference is known at any scale. Of a head that is shut to the
    common token the log of its gates goes into the scale: s(z) is e^z there."""
    z, d = (part if part.log.ndim > 1 else part.by_head() for part in (z, d))
    shape = d.value.shape
    z, d = z.heads_as_samples(), d.heads_as_samples()
    Z, D = z.explicit(), d.explicit()
    most = Z.amax(-1)
    top = torch.where(most < SHUT, most, 0.0)
    gate = (Z - top[:, None]).exp().where(top[:, None] < 0, Z.sigmoid())
    change = tanh_change(Z / 2, D / 2, d * 0.5) * 0.5
    return Scaled(gate, top).samples_as_heads(shape), change.normalised().samples_as_heads(shape)

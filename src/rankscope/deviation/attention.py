"""Attention of a state: the part of P that differs from row to row, and nothing else, acts on the deviation.

Rows of P sum to one, so with X = 1 x^T + e^s R and p the reference row of P (`softmax.py`)

    P X = 1 (x + e^s p^T R) + e^s (P - 1 p^T) R:

the common token moves to the weighted mean, and the deviation is multiplied by P - 1 p^T. Taken about row j*
of R, j* the largest entry of p, the column j* of P, of which only 1 - p_j* is left to see when attention is
sharp, takes no part.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from rankscope.deviation.decisions import must_compute
from rankscope.deviation.mlp import affine, product
from rankscope.deviation.scaled import Scaled, chosen
from rankscope.deviation.state import State, ValidTokens
from rankscope.nets.architecture import Architecture
from rankscope.nets.padding import TokenOrder
from rankscope.nets.weights import Linear
from rankscope.shapes import Bool, Float, Int

Visible = Bool[Tensor, "batch 1 row token"]
SHORT = 0.01
"""What a token hears, beside the mean of all, from which on differences from the mean are not taken."""


@dataclass(frozen=True)
class Logits:
    """`ref_j + D_ij`: its softmax is P, small weights as exact as large ones."""

    ref: Float[Tensor, "batch head token"]
    D: Scaled  # [batch, head, row, token]
    fine: Scaled | None = None
    """ref at a scale of its own, however small; None where only P is asked for."""

    @property
    def reference(self) -> Scaled:
        """ref at a scale of its own, of all that `softmax.split` gives."""
        assert self.fine is not None
        return self.fine

    def softmax(self, visible: Visible) -> Float[Tensor, "batch head row token"]:
        """P, over what each row sees."""
        scores = self.ref[:, :, None] + self.D.explicit()
        return scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0)  # of padding

    def log_softmax(self, visible: Visible) -> Float[Tensor, "batch head row token"]:
        """log P, over what each row sees; -inf elsewhere."""
        scores = self.ref[:, :, None] + self.D.explicit()
        return (
            scores.masked_fill(~visible, -torch.inf)
            .log_softmax(-1)
            .nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        )

    def restored(self, order: TokenOrder) -> "Logits":
        """Tokens back where they stood."""
        columns = order.restored_columns
        fine = self.fine and self.fine.mapped(columns)
        return Logits(columns(self.ref), self.D.mapped(order.restored_square), fine)


@dataclass(frozen=True)
class DeviationPattern:
    """Attention of a layer in two parts: `P = 1 p^T + Delta`. Rows are of the tokens, and so are columns
    but for cross-attention."""

    p: Float[Tensor, "batch head token"]
    others: Scaled  # [batch, head, row, token]
    """Delta but for column j*, which is left zero."""
    top: Int[Tensor, "batch head 1"]
    """j*, the largest entry of p."""
    visible: Visible
    logits: Logits | None = None
    """The scores that P is the softmax of; None where it was not made of scores."""
    signed: bool = False
    """Whether weights may be below zero, as those that a part of one's own has changed."""
    total: Float[Tensor, "*batch #head"] | None = None
    """What p sums to, and rows but for `apart`; None: one."""
    apart: Scaled | None = None  # [batch, head, row]
    """What each row sums to beyond that; None: nothing, rows sum alike."""
    scaled_p: Scaled | None = None  # [batch, head, token]
    """p at a scale of its own, where it may be smaller than floating point reaches; None: p itself."""

    @cached_property
    def Delta(self) -> Scaled:
        """`P - 1 p^T`: its rows sum to zero, or `apart`, which gives column j*."""
        return self.by_head.together()

    @property
    def by_head(self) -> Scaled:
        """The same, each head at a scale of its own."""
        return completed(self.others, self.top, self.apart)

    def differenced(self, V: Float[Tensor, "batch head token width"]) -> Scaled:
        """`Delta V` of what has zeros in row j*."""
        return Scaled(self.others.value @ V, self.others.log)

    def averaged(self, V: Float[Tensor, "batch head token width"]) -> Float[Tensor, "batch head row width"]:
        """`P V`."""
        return self.matrix() @ V

    def matrix(self) -> Float[Tensor, "batch head row token"]:
        """P as an ordinary tensor."""
        return self._matrix

    @cached_property
    def _matrix(self) -> Float[Tensor, "batch head row token"]:
        if self.logits is not None and not self.signed:
            return self.logits.softmax(self.visible)
        P = self.p[:, :, None] + self.Delta.explicit()
        return P * self.visible.any(-1, keepdim=True)  # rows of padding stay zero


def completed(others: Scaled, top: Int[Tensor, "batch head 1"], sums: Scaled | None = None) -> Scaled:
    """Rows that sum to zero, or to `sums`, of which column j* was left out."""
    value = others.value
    column = top[:, :, None].expand(-1, -1, value.shape[2], 1)
    if sums is not None:
        last = others.mapped(lambda t: -t.sum(-1, keepdim=True)) + sums.mapped(lambda t: t[..., None])
        rest = others.mapped(lambda t: t.scatter(-1, column, 0.0))
        return rest + last.mapped(lambda t: torch.zeros_like(value).scatter(-1, column, t))
    return Scaled(value.scatter(-1, column, -value.sum(-1, keepdim=True)), others.log)


@dataclass(frozen=True)
class HeadOutputs:
    """What the heads of a layer say, before the output projection: one common value each, and deviations."""

    x: Scaled  # [batch, head, head_width]
    R: Scaled  # [batch, head, token, head_width]
    output: Float[Tensor, "head head_width width"]
    valid: ValidTokens

    def contributions(self, valid: ValidTokens) -> State:
        """What each head adds to the branch, as a state of batch * head samples."""
        heads = self.output.shape[0]
        x = torch.einsum("bhc,hcd->bhd", self.x.value, self.output)
        R = torch.einsum("bhtc,hcd->bhtd", self.R.value, self.output)
        return State(
            Scaled(x.flatten(0, 1), self.x.log.flatten()),
            Scaled(R.flatten(0, 1), self.R.log.flatten()),
            ValidTokens(valid.mask.repeat_interleave(heads, 0)),
        ).tidy()


@dataclass(frozen=True)
class Values:
    """What heads mix: that of the common token, and the tokens' deviations from it."""

    x: Scaled  # [batch, head, head_width]
    R: Scaled  # [batch, head, token, head_width]
    valid: ValidTokens


@runtime_checkable
class Mixable(Protocol):
    """What `mixed` asks of P, whole or by rows."""

    @property
    def p(self) -> Tensor:
        """What all rows share."""

    @property
    def top(self) -> Tensor:
        """j*."""

    @property
    def signed(self) -> bool:
        """Whether weights may be below zero."""

    def differenced(self, V: Tensor) -> Scaled:
        """`Delta V` of what has zeros in row j*."""

    def averaged(self, V: Tensor) -> Tensor:
        """`P V`."""


def mixed(
    arch: Architecture, active_heads: tuple[int, ...], output: Tensor, P: Mixable, v: Values
) -> HeadOutputs:
    """Rows of P sum to one: the common value passes, the deviation is averaged and differenced, both about
    the token that most attend to. Where they sum to something else, so much of the common value passes, and
    where some rows sum to more than others, tokens differ by as much of it.

    Where a token says far less than the mean of all (it looks at short tokens, the others at long ones), what
    is left of it beside the mean is rounding: there `P V` is taken as it stands."""
    dv = v.R
    most = dv.value.gather(
        2, P.top[..., None].expand(-1, -1, -1, dv.value.shape[-1])
    )  # [batch, head, 1, width]
    about = dv.value - most
    total: Tensor | None = getattr(P, "total", None)
    shared: Scaled | None = getattr(P, "scaled_p", None)
    sums: Scaled | None = getattr(P, "apart", None)
    kept = most if total is None else most * total[..., None, None]
    if shared is None:
        mean = Scaled((kept + P.p[:, :, None] @ about)[:, :, 0], dv.log)  # [batch, head, head_width]
    else:
        mean = Scaled((shared.value[:, :, None] @ about)[:, :, 0], shared.log + dv.log).normalised()
        mean = mean + Scaled(kept[:, :, 0], dv.log).normalised()
    R = P.differenced(about)  # [batch, head, token, head_width]
    R = Scaled(R.value, R.log + dv.log)
    if sums is not None:
        heard = Scaled(most, dv.log).normalised() + v.x.mapped(lambda t: t[:, :, None])
        R = R + product(sums.mapped(lambda t: t[..., None]), heard)
    x = (v.x if total is None else _times(v.x, total)) + mean
    if not P.signed and must_compute("attention.short", (short := _short(P, dv, mean, v.valid)).any()):
        straight = Scaled(P.averaged(dv.value), dv.log)
        x, R = chosen(short, v.x, x), chosen(short, straight, R)
    if len(active_heads) < arch.heads:
        speaks = torch.zeros(arch.heads, 1, dtype=x.value.dtype, device=x.value.device)
        for head in active_heads:  # a list of them would have to cross to where the heads are
            speaks[head] = 1.0
        x, R = x.mapped(lambda t: t * speaks), R.mapped(lambda t: t * speaks[:, None])
    return HeadOutputs(x.normalised(), R.normalised(), output, v.valid)


def _times(x: Scaled, total: Tensor) -> Scaled:
    """Each head's common value as often as its rows say."""
    return x.mapped(lambda t: t * total[..., None]).normalised()  # zeros do not set the scale


def _short(P: Mixable, dv: Scaled, mean: Scaled, valid: ValidTokens) -> Bool[Tensor, "batch head"]:
    """Where some token, of what it looks at, hears less than a hundredth of the mean."""
    sizes = torch.linalg.vector_norm(dv.value, dim=-1, keepdim=True)  # [batch, head, token, 1]
    least, most = sizes.amin((2, 3)), sizes.amax((2, 3))
    if not must_compute("attention.lengths", (least < SHORT * most).any()):
        return torch.zeros_like(least, dtype=torch.bool)
    heard = P.averaged(sizes)[..., 0].masked_fill(~valid.mask[:, None], torch.inf)
    return heard.amin(-1) < SHORT * torch.linalg.vector_norm(mean.value, dim=-1)


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

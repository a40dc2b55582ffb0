"""The cap on scores, `s -> C tanh(s / C)` (Gemma 2), of scores split into a shared row and the rest.

Called by `scores.py` (`capped`). A score is `c + r_i + h_j + D_ij`: without a cap c and r_i are constant along a row
and drop out of the softmax; under it they do not. With T = tanh, all in units of C, and `x = c + r_i + h_j`,

    T(x + D) = [T(c + r_i): constant along the row] + [T(c + h_j) - T(c): the same in every row]
             + [T(x + D) - T(x)] + [T(x) - T(c + r_i) - T(c + h_j) + T(c)],

where no difference is taken of rounded numbers:

    T(x + D) - T(x)                          =  sinh(D) / (cosh(x) cosh(x + D)),
    T(x) - T(c + r) - T(c + h) + T(c)        = -sinh(r) sinh(h) sinh(2c + r + h)
                                               / (cosh(c) cosh(c + r) cosh(c + h) cosh(x)).

Where scores s reach the cap, T is a sign but for `e^{-2|s|}`, which may be all that rows differ by; c, `c + r` or x,
which are no scores, may have another sign, and hide it. There a query a and a key b are chosen (`CapReference`), c is
the score s_ab, `c + r_i` is s_ib and `c + h_j` is s_aj. The last two brackets are then the same as

    [T(s_ij) - T(s_aj)] - [T(s_ib) - T(s_ab)],    and as    [T(s_ij) - T(s_ib)] - [T(s_aj) - T(s_ab)].

Where r, h and D are at most one, an entry is the sum of the brackets; elsewhere it is the one of these whose terms are
smaller. Every entry has a scale of its own until all are known.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from rankscope.deviation.activations import sinh_share, tanh_change, tanh_difference
from rankscope.deviation.decisions import piecewise
from rankscope.deviation.state import Entries, LogScales, Scaled, as_tensor, chosen, largest_log, spread
from rankscope.doubled import quotient
from rankscope.shapes import Bool, Int

REACHED = 3.0  # the largest score, in caps, up to which the first formula is taken: tanh is flat by 0.01 there


class RowConstants(NamedTuple):
    """The parts of scores that are constant along each row, and which rows and columns are tokens."""

    c: Scaled  # [batch, head, 1], common to all rows
    rows: Scaled  # [batch, head, row], of each row
    queries: Bool[Tensor, "batch row"]
    keys: Bool[Tensor, "batch token"]

    def of(self, rows: slice) -> "RowConstants":
        """The parts of some rows alone."""
        return self._replace(rows=self.rows.mapped(lambda t: t[..., rows]), queries=self.queries[:, rows])

    def narrowed(self, sample: slice, head: slice) -> "RowConstants":
        """The parts of some samples and heads alone."""
        at = sample, head
        return RowConstants(self.c[at], self.rows[at], self.queries[sample], self.keys[sample])


class CapReference(NamedTuple):
    """The query a and the key b of the module's docstring: a has the smallest scores, b the largest score of a."""

    largest: LogScales  # the log of the largest part of any score
    r: Scaled  # [batch, head, 1]: r_a
    D: Scaled  # [batch, head, token]: D_aj
    key: Int[Tensor, "batch head 1"]

    @classmethod
    def of(cls, constant: RowConstants, ref: Scaled, blocks: Iterable[tuple[slice, Scaled]]) -> "CapReference":
        """From the parts of all scores; D comes by blocks of rows."""
        sizes, least, r, row = [part.log_size() for part in (constant.c, constant.rows, ref)], None, constant.c, ref
        for rows, D in blocks:
            sizes.append(D.log_size())
            entries = D.value.masked_fill(~constant.keys[:, None, None], 0.0)
            logs = torch.maximum(entries.amax(-1), -entries.amin(-1)).log() + D.log[..., None]
            logs = logs.masked_fill(~constant.queries[:, None, rows], torch.inf)
            at = logs.argmin(-1, keepdim=True)  # [batch, head, 1]
            log = logs.gather(-1, at)[..., 0]
            better = torch.ones_like(log, dtype=torch.bool) if least is None else log < least
            least = log if least is None else torch.where(better, log, least)
            r = chosen(better, constant.rows.mapped(lambda t, at=at, rows=rows: t[..., rows].gather(-1, at)), r)
            place = at[..., None].expand(-1, -1, 1, D.value.shape[3])
            row = chosen(better, D.mapped(lambda t, place=place: t.gather(2, place)[:, :, 0]), row)
        scores = (ref + row).value.masked_fill(~constant.keys[:, None], -torch.inf)
        return cls(torch.stack(sizes).amax(0), r, row, scores.argmax(-1, keepdim=True))

    def narrowed(self, sample: slice, head: slice) -> "CapReference":
        """The reference of some samples and heads alone."""
        at = sample, head
        return CapReference(self.largest[at], self.r[at], self.D[at], self.key[at])


def capped(constant: RowConstants, ref: Scaled, D: Scaled, cap: float, about: CapReference) -> tuple[Scaled, Scaled]:
    """(ref, D) of capped scores, of all rows or of some."""
    shape, share = ref.value.shape, quotient(1.0, cap, ref.value)
    parts = (constant.c, constant.rows, ref, D, about.r, about.D)
    c, r, h, D, r_a, D_a = ((part * share).heads_as_samples() for part in parts)
    at, across, down = c.explicit()[..., None], h.explicit()[:, None], r.explicit()[..., None]
    new_ref = tanh_change(at.expand(-1, -1, shape[2]), across, Scaled(h.value[:, None], h.log))
    slope, exponent = _bent(at, down, across)
    largest = largest_log(exponent)
    slope = slope * (exponent - spread(largest, exponent)).exp()
    bent = Scaled(r.value[..., None] * h.value[:, None] * slope, r.log + h.log + largest)
    new_D = tanh_change(at + down + across, D.explicit(), D) + bent
    reached = (about.largest > math.log(REACHED * cap)).flatten()

    def at_cap() -> tuple[Scaled, Scaled]:
        fine_ref, fine_D = _about_scores(c, r, h, D, r_a, D_a, about.key.flatten(0, 1)[..., None])
        queries, keys = (mask.repeat_interleave(shape[1], 0) for mask in (constant.queries, constant.keys))
        return fine_ref.within(keys[:, None]), fine_D.within(keys[:, None] & queries[..., None])

    new_ref, new_D = piecewise("cap.reached", reached, at_cap, (new_ref, new_D))
    new_ref = new_ref.mapped(lambda t: t[:, 0])
    return new_ref.samples_as_heads(shape) * cap, new_D.samples_as_heads(shape) * cap


def _bent(c: Tensor, r: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """(a, b) of the last bracket `T(c + r + h) - T(c + r) - T(c + h) + T(c) = a e^b r h`."""
    corners = (c, c + r, c + h, c + r + h)
    middle = 2 * c + r + h
    exponent = r.abs() + h.abs() + middle.abs()
    for corner in corners:
        exponent = exponent - corner.abs()
    slope = -8 * sinh_share(r) * sinh_share(h) * torch.expm1(-2 * middle.abs())
    slope = torch.where(middle > 0, -slope, slope)
    for corner in corners:
        slope = slope / (1 + (-2 * corner.abs()).exp())
    return slope, exponent.clamp(max=0.0)  # but for rounding, it is


def _about_scores(
    c: Scaled, r: Scaled, h: Scaled, D: Scaled, r_a: Scaled, D_a: Scaled, key: Int[Tensor, "sample 1 1"]
) -> tuple[Entries, Entries]:
    """(T(s_aj) - T(s_ab) `[sample, 1, token]`, the rest `[sample, row, token]`) of scores s_ij in caps; `key` is b."""

    def of_key(t: Tensor) -> Tensor:
        return t.gather(2, key.expand(-1, t.shape[1], 1))

    r = r.mapped(lambda t: t[..., None])
    c, h, r_a, D_a = (part.mapped(lambda t: t.view(len(t), 1, -1)) for part in (c, h, r_a, D_a))
    s, s_a = as_tensor(c + r + (h + D)), as_tensor(c + r_a + (h + D_a))  # s_ij, s_aj
    s_b, s_ab = of_key(s), of_key(s_a)
    from_h, from_D, from_D_a = (part.mapped(lambda t: t - of_key(t)) for part in (h, D, D_a))
    down = (r + r_a * -1.0) + (D + D_a * -1.0)  # s_ij - s_aj
    shared = tanh_difference(s_ab, s_a, from_h + from_D_a)
    by_row, by_column = tanh_difference(s_a, s, down), tanh_difference(s_b, s, from_h + from_D)
    of_b = by_row.mapped(of_key)
    smaller = torch.maximum(by_column.log, shared.log) < torch.maximum(by_row.log, of_b.log)
    rest = (by_row + -of_b).or_(by_column + -shared, smaller)
    r, h, D = down.mapped(of_key), from_h + from_D_a, from_D + from_D_a * -1.0
    R, H, step = map(as_tensor, (r, h, D))
    x = s_ab + R + H
    brackets = tanh_difference(x, x + step, D) + Entries.of(r) * Entries.of(h) * Entries.product(*_bent(s_ab, R, H))
    near = (R.abs() <= 1) & (H.abs() <= 1) & (step.abs() <= 1)
    return shared, rest.or_(brackets, near)

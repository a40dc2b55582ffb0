"""The cap on scores, `s -> C tanh(s / C)` (Gemma 2), of scores split into a shared row and the rest.

Called by `scores.py` (`capped`). A score is `c + r_i + h_j + D_ij`: without a cap c and r_i are constant along a row
and drop out of the softmax; under it they do not. With T = tanh, all in units of C, and `x = c + r_i + h_j`,

    T(x + D) = [T(c + r_i): constant along the row] + [T(c + h_j) - T(c): the same in every row]
             + [T(x + D) - T(x)] + [T(x) - T(c + r_i) - T(c + h_j) + T(c)],

where no difference is taken of rounded numbers:

    T(x + D) - T(x)                          =  sinh(D) / (cosh(x) cosh(x + D)),
    T(x) - T(c + r) - T(c + h) + T(c)        = -sinh(r) sinh(h) sinh(2c + r + h)
                                               / (cosh(c) cosh(c + r) cosh(c + h) cosh(x)).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rankscope.deviation.activations import largest_log, sinh_share, tanh_change
from rankscope.deviation.decisions import must_compute
from rankscope.deviation.scaled import STEEPEST, LogScales, Scaled, chosen, spread
from rankscope.doubled import quotient

SATURATED = 1e3  # tanh is one to every digit from here on


class RowConstants(NamedTuple):
    """The parts of scores that are constant along each row: c common to all rows, r_i of row i."""

    c: Scaled  # [batch, head]
    rows: Scaled  # [batch, head, token]


def capped(
    constant: RowConstants | None, ref: Scaled, D: Scaled, cap: float, largest: LogScales | None = None
) -> tuple[Scaled, Scaled]:
    """(ref, D) of capped scores, of all rows or of some. Without a `constant`, ref is zero and D the whole score.
    `largest` is the log of the largest part of the scores of all rows; if left out, that of these rows."""
    batch, heads, n = ref.value.shape
    share = quotient(1.0, cap, ref.value)
    c = ref.mapped(lambda t: t[..., :1] * 0.0) if constant is None else constant.c.mapped(lambda t: t[..., None])
    rows = D.mapped(lambda t: t[..., 0] * 0.0) if constant is None else constant.rows
    parts = [(part * share).heads_as_samples().normalised() for part in (c, rows, ref, D)]
    top = torch.stack([part.log for part in parts]).amax(0)
    top = top if largest is None else largest.flatten() - math.log(cap)
    cut = (top - STEEPEST).clamp(min=0.0)
    common, r, h, D = (Scaled(part.value, part.log - cut) for part in parts)
    at, across, down = common.explicit()[..., None], h.explicit()[:, None], r.explicit()[..., None]
    new_ref = tanh_change(at.expand(-1, -1, n), across, Scaled(h.value[:, None], h.log))
    new_D = tanh_change(at + down + across, D.explicit(), D) + _bent(at, r, h, down, across)
    if must_compute("cap.beyond", (beyond := cut > 0).any()):
        straight = _straight(at, down, across, D.explicit(), cut)
        new_ref, new_D = (chosen(beyond, Scaled.plain(a), b) for a, b in zip(straight, (new_ref, new_D), strict=True))
    return tuple(  # type: ignore[return-value]
        Scaled(value.view(batch, heads, *value.shape[1:]), log.view(batch, heads)) * cap
        for value, log in ((new_ref.value[:, 0], new_ref.log), (new_D.value, new_D.log))
    )


def _straight(at: Tensor, down: Tensor, across: Tensor, D: Tensor, cut: Tensor) -> tuple[Tensor, Tensor]:
    """(ref `[sample, 1, column]`, D `[sample, row, column]`) in units of the cap as plain differences of tanh, for
    scores beyond e^600 caps. c, r, h and D are given times e^-cut; T(c + r), constant along a row, is left out."""
    grow = spread(cut.clamp(max=STEEPEST).exp(), D)

    def T(x: Tensor) -> Tensor:
        return torch.tanh((x * grow).clamp(-SATURATED, SATURATED))

    shared = T(at + across) - T(at)
    return shared, T(at + down + across + D) - T(at + down) - shared


def _bent(c: Tensor, r: Scaled, h: Scaled, down: Tensor, across: Tensor) -> Scaled:
    """The last bracket `T(c + r + h) - T(c + r) - T(c + h) + T(c)`; `down` and `across` are r and h as tensors."""
    corners = (c, c + down, c + across, c + down + across)
    middle = 2 * c + down + across
    exponent = down.abs() + across.abs() + middle.abs()
    for corner in corners:
        exponent = exponent - corner.abs()
    exponent = exponent.clamp(max=0.0)  # but for rounding, it is
    largest = largest_log(exponent)
    slope = -8 * sinh_share(down) * sinh_share(across) * torch.expm1(-2 * middle.abs())
    slope = torch.where(middle > 0, -slope, slope) * (exponent - spread(largest, exponent)).exp()
    for corner in corners:
        slope = slope / (1 + (-2 * corner.abs()).exp())
    return Scaled(r.value[..., None] * h.value[:, None] * slope, r.log + h.log + largest)

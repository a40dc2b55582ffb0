"""Gates on heads, of a state: what a sigmoid does to a common token and to deviations from it.

    s(z + d) - s(z) = s(z) s(-z) e / (1 + s(z) e),    e = e^d - 1,

no two nearly equal numbers subtracted; where |d| is above one the plain difference is as good, taken on the
side of 0 where s is small.
"""

import torch
from torch import Tensor

from rankscope.deviation.attention import HeadOutputs
from rankscope.deviation.mlp import product
from rankscope.deviation.scaled import STEEPEST, Scaled, spread

FADED = -300.0
"""The log of a head's largest gate below which it goes into the scale."""


def gated(spoken: HeadOutputs, z: Scaled, d: Scaled) -> HeadOutputs:
    """What heads say times the sigmoid of z, `[batch, head, head_width]`, and of what deviates from it, d."""
    g, change = sigmoid(z, d)
    x, R = spoken.x, spoken.R
    over = g.mapped(lambda v: v[:, :, None])
    apart = product(change, x.mapped(lambda v: v[:, :, None])) + product(over, R) + product(change, R)
    return HeadOutputs(product(g, x), apart, spoken.output, spoken.valid)


def sigmoid(z: Scaled, d: Scaled) -> tuple[Scaled, Scaled]:
    """(s(z), s(z + d) - s(z)), head by head: z of one axis, tokens, fewer than d. Of a head that is shut to
    every token the log of its gates goes into the scale: s(z) is e^z there."""
    z, d = z.by_head(), d.by_head()
    Z, D = z.explicit(), d.explicit()
    wide, moved = Z[:, :, None], Z[:, :, None] + D
    most = (
        torch.maximum(_log(Z).amax(-1), _log(moved).flatten(2).amax(-1)) if D.shape[2] else _log(Z).amax(-1)
    )
    top = torch.where(most < FADED, most, 0.0)  # [batch, head]
    up = spread(top, D)
    open_, shut = (wide - up).exp().where(up < 0, wide.sigmoid()), (-wide).sigmoid()
    level = d.log.clamp(max=0.0)
    size = spread(level.clamp(min=-STEEPEST).exp(), D)  # below, e^d - 1 is d and only the log goes on
    small = d.value * spread((d.log - level).clamp(max=STEEPEST).exp(), D)  # d in units of size
    large = D.abs() > 1
    e = torch.expm1((small * size).masked_fill(large, 0.0)) / size
    near = open_ * shut * e / (1 + wide.sigmoid() * size * e)
    after = (moved - up).exp().where(up < 0, moved.sigmoid())
    far = torch.where(wide > 0, shut - (-moved).sigmoid(), after - open_) / size
    common = (Z - spread(top, Z)).exp().where(spread(top, Z) < 0, Z.sigmoid())
    return Scaled(common, top), Scaled(torch.where(large, far, near), level + top).normalised()


def _log(z: Tensor) -> Tensor:
    """log s(z), nearly."""
    return z.clamp(max=0.0)

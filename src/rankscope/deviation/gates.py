"""Gates on heads, of a state: what a sigmoid does to a common token and to deviations from it.

    s(z + d) - s(z) = s(z) s(-z) e / (1 + s(z) e),    e = e^d - 1,

no two nearly equal numbers subtracted; where |d| is above one the plain difference is as good, taken on the
side of 0 where s is small.
"""

import torch
from torch import Tensor

from rankscope.deviation.attention import Spoken
from rankscope.deviation.mlp import product
from rankscope.deviation.scaled import STEEPEST, Scaled, spread


def gated(spoken: Spoken, z: Scaled, d: Scaled) -> Spoken:
    """What heads say times the sigmoid of z, `[batch, head, head_width]`, and of what deviates from it, d."""
    g, G = sigmoid(z, d)
    x, R = spoken.x, spoken.R
    common, over = Scaled.plain(g).by_head(), Scaled.plain(g[:, :, None]).by_head()
    change = G.by_head()
    apart = product(change, x.mapped(lambda v: v[:, :, None])) + product(over, R) + product(change, R)
    return Spoken(product(common, x), apart, spoken.output, spoken.real)


def sigmoid(z: Scaled, d: Scaled) -> tuple[Tensor, Scaled]:
    """(s(z), s(z + d) - s(z)): z of one axis, tokens, fewer than d."""
    Z, D = z.explicit(), d.explicit()
    wide = Z[:, :, None]
    open_, shut = wide.sigmoid(), (-wide).sigmoid()
    level = d.log.clamp(max=0.0)
    size = spread(level.clamp(min=-STEEPEST).exp(), D)  # below, e^d - 1 is d and only the log goes on
    small = d.value * spread((d.log - level).clamp(max=STEEPEST).exp(), D)  # d in units of size
    large = D.abs() > 1
    e = torch.expm1((small * size).masked_fill(large, 0.0)) / size
    near = open_ * shut * e / (1 + open_ * size * e)
    moved = wide + D
    far = torch.where(wide > 0, shut - (-moved).sigmoid(), moved.sigmoid() - open_) / size
    return Z.sigmoid(), Scaled(torch.where(large, far, near), level)

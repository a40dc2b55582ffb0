"""Activations far out in a tail, where float64 has nothing left of them: their logs, and differences.

Below its `TAIL` each activation but relu is `-e^{L(z)}`, with

| activation   | L(z)                                                              |
|--------------|-------------------------------------------------------------------|
| `silu`       | `log|z| + z`                                                      |
| `quick_gelu` | `log|z| + 1.702 z`                                                |
| `gelu_tanh`  | `log|z| + 2 sqrt(2/pi) (z + 0.044715 z^3)`                        |
| `gelu`       | `-z^2/2 - log sqrt(2 pi) + log s(1/z^2)`, s Mills' ratio's series |

and a difference is `-e^{L(z)} expm1(L(z + d) - L(z))`. tanh has two tails, in both of which it is constant:

    tanh(z + d) - tanh(z) = sinh(d) / (cosh(z) cosh(z + d)).
"""

import math

import torch
from torch import Tensor

from rankscope.deviation.scaled import LOWEST, Scaled, spread

TAIL = {"silu": -35.0, "quick_gelu": -35.0, "gelu": -35.0, "gelu_tanh": -12.0}
"""From where on each is its L(z), and before float64 has lost it."""
_A, _B = math.sqrt(2 / math.pi), 0.044715
_MILLS = (-1.0, 5 / 2, -37 / 3, 353 / 4, -4081 / 5)
"""log of Mills' ratio times z, in powers of 1/z^2."""
TINY = 1e-290
SLOPES = {"silu": 1.0, "quick_gelu": 1.702}
FADING = (*SLOPES, "gelu", "gelu_tanh")
"""Activations that vanish in their lower tail."""


def tanh_change(Z: Tensor, D: Tensor, d: Scaled) -> Scaled:
    """`tanh(Z + D) - tanh(Z)`, D the same as d in units of one; Z of each token, or of all."""
    Z = Z[:, None] if Z.ndim < D.ndim else Z
    # |D| - |Z| - |Z + D|, without the digits that its terms lose to each other.
    exponent = torch.where(Z * (Z + D) > 0, -2 * torch.minimum(Z.abs(), (Z + D).abs()), 0.0)
    largest = most(exponent)
    slope = 4 * sinh_share(D) * (exponent - spread(largest, exponent)).exp()
    slope = slope / ((1 + (-2 * Z.abs()).exp()) * (1 + (-2 * (Z + D).abs()).exp()))
    return Scaled(d.value * slope, d.log + largest)


def sinh_share(D: Tensor) -> Tensor:
    """`sinh(D) / (D e^|D|)`."""
    return over(-torch.expm1(-2 * D.abs()), 2 * D.abs())


def faded(name: str, Z: Tensor, D: Tensor, d: Scaled) -> tuple[Scaled, Scaled]:
    """(act(Z), act(Z + D) - act(Z)) where all of Z, or none, and all of Z + D lie in the lower tail."""
    nothing = Z == 0  # act(0) is 0: the difference is the activation itself
    Z = torch.where(nothing, torch.full_like(Z, TAIL[name]), Z)
    L, Z = _log(name, Z), Z[:, None]
    whole = _log(name, torch.where(nothing[:, None], D, Z + D).clamp(max=TAIL[name]))
    rise = torch.where(nothing[:, None], whole - L[:, None], D * _slope(name, Z, D))
    L = L.masked_fill(nothing, -torch.inf)
    largest = torch.maximum(most(L[:, None]), most(whole))
    weight = (L - largest[:, None]).exp()
    unit = spread(d.log.clamp(min=-600).exp(), D)
    large = (rise.abs() > 1) | nothing[:, None]
    grown = ((whole - spread(largest, whole)).exp() - weight[:, None]) / unit
    small = weight[:, None] * d.value * _slope(name, Z, D) * over(torch.expm1(rise.clamp(max=2.0)), rise)
    return Scaled(-weight, largest), Scaled(-torch.where(large, grown, small), largest + d.log)


def _log(name: str, z: Tensor) -> Tensor:
    """L(z)."""
    if name in SLOPES:
        return z.abs().log() + SLOPES[name] * z
    if name == "gelu_tanh":
        return z.abs().log() + 2 * _A * (z + _B * z**3)
    v = z.square().reciprocal()
    return -z.square() / 2 - 0.5 * math.log(2 * math.pi) + sum(c * v ** (k + 1) for k, c in enumerate(_MILLS))


def _slope(name: str, z: Tensor, d: Tensor) -> Tensor:
    """`(L(z + d) - L(z)) / d`, at d = 0 its derivative."""
    grows = over(torch.log1p((d / z).clamp(min=-1.0)), d / z) / z  # (log|z + d| - log|z|) / d
    if name in SLOPES:
        return grows + SLOPES[name]
    if name == "gelu_tanh":
        return grows + 2 * _A * (1 + _B * (3 * z.square() + 3 * z * d + d.square()))
    v, step = z.square().reciprocal(), torch.log1p((d / z).clamp(min=-1.0))
    found = -(z + d / 2)
    for k, c in enumerate(_MILLS, 1):
        found = found - 2 * k * c * v**k * grows * over(torch.expm1(-2 * k * step), -2 * k * step)
    return found


def over(a: Tensor, b: Tensor) -> Tensor:
    """a / b, one where both vanish: among subnormal numbers they have few digits, and need not agree."""
    gone = b.abs() < TINY
    return torch.where(gone, torch.ones_like(a), a / b.masked_fill(gone, 1.0))


def most(logs: Tensor) -> Tensor:
    """The largest of each sample."""
    flat = logs.flatten(1)
    return flat.amax(1).clamp(min=LOWEST / 4) if flat.shape[1] else flat.sum(1)

"""Taylor coefficients of each activation at a point: `act(z + d) = sum_k f_k d^k`.

Each follows from the differential equation of its transcendental part, coefficient by coefficient; `f[k]` is
the k-th derivative over k!. They are taken at the common token alone, once per sample, so that the deviation
of every token costs a polynomial and no transcendental function.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from rankscope.deviation.scaled import LOWEST, Scaled, spread
from rankscope.doubled import constant
from rankscope.nets.activations import ACTIVATIONS

Series = list[Tensor]


def _product(u: Series, v: Series, k: int) -> Tensor:
    """The k-th coefficient of u v."""
    return torch.stack([u[i] * v[k - i] for i in range(k + 1)]).sum(0)


def _times_z(z: Tensor, u: Series) -> Series:
    """Coefficients of (z + d) u(d)."""
    return [z * u[0], *(z * u[k] + u[k - 1] for k in range(1, len(u)))]


def _normal_cdf(z: Tensor) -> Tensor:
    """Phi(z), accurate in its lower tail (torch's ndtr is 1 + erf, which cancels there)."""
    return torch.special.erfc(z * -constant("sqrt(1/2)", z)) / 2


def _gelu(z: Tensor, order: int) -> Series:
    """z Phi(z), with Phi' = phi and phi' = -z phi."""
    phi = [torch.exp(-z.square() / 2) * constant("1/sqrt(2 pi)", z)]
    for k in range(order):
        before = phi[k - 1] if k else torch.zeros_like(z)
        phi.append(-(z * phi[k] + before) / (k + 1))
    Phi = [_normal_cdf(z), *(phi[k] / (k + 1) for k in range(order))]
    return _times_z(z, Phi)


def _sigmoid(z: Tensor, order: int) -> Series:
    """s' = s (1 - s), taken on the side where s is small: s(z) = 1 - s(-z)."""
    s = [torch.sigmoid(-z.abs())]
    for k in range(order):
        s.append((s[k] - _product(s, s, k)) / (k + 1))
    # The k-th derivative of s is even or odd as k is odd or even.
    sign = torch.where(z > 0, -torch.ones_like(z), torch.ones_like(z))
    return [torch.sigmoid(z), *(s[k] if k % 2 else sign * s[k] for k in range(1, order + 1))]


def _silu(z: Tensor, order: int) -> Series:
    return _times_z(z, _sigmoid(z, order))


def _quick_gelu(z: Tensor, order: int) -> Series:
    c = constant("1.702", z)
    s = _sigmoid(c * z, order)
    return _times_z(z, [coefficient * c**k for k, coefficient in enumerate(s)])


def _tanh(z: Tensor, order: int) -> Series:
    """2 s(2z) - 1: all coefficients but the first are the sigmoid's; 1 - tanh^2 would cancel."""
    s = _sigmoid(2 * z, order)
    return [torch.tanh(z), *(2.0 ** (k + 1) * s[k] for k in range(1, order + 1))]


def _gate(z: Tensor) -> Tensor:
    """(1 + tanh(sqrt(2/pi) (z + 0.044715 z^3))) / 2, which gelu_tanh multiplies z with."""
    return torch.sigmoid(2 * constant("sqrt(2/pi)", z) * (z + constant("0.044715", z) * z**3))


def _gelu_tanh(z: Tensor, order: int) -> Series:
    """z (1 + tanh u) / 2 = z s(2u), s the sigmoid, u = sqrt(2/pi) (z + 0.044715 z^3): s' = s (1 - s) 2u'."""
    zero = torch.zeros_like(z)
    a, b = constant("sqrt(2/pi)", z), constant("0.044715", z)
    slope = [a * (1 + 3 * b * z.square()), a * 6 * b * z, zero + a * 3 * b]
    inner = [2 * coefficient for coefficient in (slope + [zero] * order)[:order]]
    s = [_gate(z)]
    less: Series = []
    for k in range(order):
        less.append(s[k] - _product(s, s, k))
        s.append(_product(less, inner, k) / (k + 1))
    return _times_z(z, s)


def _relu(z: Tensor, order: int) -> Series:
    return [F.relu(z), (z > 0).to(z.dtype)] + [torch.zeros_like(z)] * (order - 1)


def _identity(z: Tensor, order: int) -> Series:
    return [z, torch.ones_like(z)] + [torch.zeros_like(z)] * (order - 1)


SERIES: dict[str, Callable[[Tensor, int], Series]] = {
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": _relu,
    "silu": _silu,
    "tanh": _tanh,
    "identity": _identity,
}

VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    **ACTIVATIONS,
    "gelu": lambda z: z * _normal_cdf(z),
    "gelu_tanh": lambda z: z * _gate(z),
    "quick_gelu": lambda z: z * torch.sigmoid(constant("1.702", z) * z),
}
"""The activations themselves, accurate in their tails."""

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _normal_cdf,
    "gelu_tanh": _gate,
    "quick_gelu": lambda z: torch.sigmoid(constant("1.702", z) * z),
    "relu": torch.zeros_like,
    "silu": torch.sigmoid,
}
"""g of the activations that are z g(z), with g(-z) = 1 - g(z): asked below zero alone, where it is exact."""


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

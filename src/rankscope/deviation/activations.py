"""The activations of an MLP, their Taylor coefficients at a point, and differences far out in their tails.

Called by `mlp.py`; `tanh_change` and what it is made of by `cap.py` too, `over` by `scores.py`.

Coefficients f_k of `act(z + d) = sum_k f_k d^k` follow from the differential equation of each activation's
transcendental part. They are taken at the common token alone, once per sample, so that the deviation of every
token costs a polynomial and no transcendental function.

Below its `TAIL`, where float64 has nothing left of them, each activation but relu is `-e^{L(z)}`, with

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
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from rankscope.deviation.state import HUGE, Entries, Scaled, as_tensor, largest_log, spread
from rankscope.doubled import constant
from rankscope.nets import ACTIVATIONS

Series = list[Tensor]


def _product(u: Series, v: Series, k: int) -> Tensor:
    """The k-th Taylor coefficient of the product u v."""
    return torch.stack([u[i] * v[k - i] for i in range(k + 1)]).sum(0)


def _times_z(z: Tensor, u: Series) -> Series:
    """Taylor coefficients of (z + d) u(d) in powers of d."""
    return [z * u[0], *(z * u[k] + u[k - 1] for k in range(1, len(u)))]


def _normal_cdf(z: Tensor) -> Tensor:
    """The normal cdf Phi(z), accurate in its lower tail (torch's ndtr is 1 + erf, which cancels there)."""
    return torch.special.erfc(z * -constant("sqrt(1/2)", z)) / 2


def _gelu(z: Tensor, order: int) -> Series:
    """Taylor coefficients 0 .. order of gelu, z Phi(z), by Phi' = phi and phi' = -z phi."""
    phi = [torch.exp(-z.square() / 2) * constant("1/sqrt(2 pi)", z)]
    for k in range(order):
        before = phi[k - 1] if k else torch.zeros_like(z)
        phi.append(-(z * phi[k] + before) / (k + 1))
    Phi = [_normal_cdf(z), *(phi[k] / (k + 1) for k in range(order))]
    return _times_z(z, Phi)


def _sigmoid(z: Tensor, order: int) -> Series:
    """Taylor coefficients of the sigmoid s by s' = s (1 - s), on the side where s is small: s(z) = 1 - s(-z)."""
    s = [torch.sigmoid(-z.abs())]
    for k in range(order):
        s.append((s[k] - _product(s, s, k)) / (k + 1))
    # The k-th derivative of s is even or odd as k is odd or even.
    sign = torch.where(z > 0, -torch.ones_like(z), torch.ones_like(z))
    return [torch.sigmoid(z), *(s[k] if k % 2 else sign * s[k] for k in range(1, order + 1))]


def _quick_gelu(z: Tensor, order: int) -> Series:
    """Taylor coefficients of z s(1.702 z), s the sigmoid."""
    c = constant("1.702", z)
    s = _sigmoid(c * z, order)
    return _times_z(z, [coefficient * c**k for k, coefficient in enumerate(s)])


def _tanh(z: Tensor, order: int) -> Series:
    """Taylor coefficients of tanh z = 2 s(2z) - 1, s the sigmoid: by 1 - tanh^2 digits would cancel."""
    s = _sigmoid(2 * z, order)
    return [torch.tanh(z), *(2.0 ** (k + 1) * s[k] for k in range(1, order + 1))]


def _gate(z: Tensor) -> Tensor:
    """The factor (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3))) / 2 that gelu_tanh multiplies z with."""
    return torch.sigmoid(2 * constant("sqrt(2/pi)", z) * (z + constant("0.044715", z) * z**3))


def _gelu_tanh(z: Tensor, order: int) -> Series:
    """Taylor coefficients 0 .. order of z s(2u), s the sigmoid and u = sqrt(2/pi) (z + 0.044715 z^3), by
    s' = s (1 - s) 2u'."""
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


SERIES: dict[str, Callable[[Tensor, int], Series]] = {
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": lambda z, order: [F.relu(z), (z > 0).to(z.dtype)] + [torch.zeros_like(z)] * (order - 1),
    "silu": lambda z, order: _times_z(z, _sigmoid(z, order)),
    "tanh": _tanh,
    "identity": lambda z, order: [z, torch.ones_like(z)] + [torch.zeros_like(z)] * (order - 1),
}
"""Functions of (z, order) that give the Taylor coefficients 0 .. order at z."""

VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    **ACTIVATIONS,
    "gelu": lambda z: z * _normal_cdf(z),
    "gelu_tanh": lambda z: z * _gate(z),
    "quick_gelu": lambda z: z * torch.sigmoid(constant("1.702", z) * z),
}
"""The values of the activations, accurate in their tails."""

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _normal_cdf,
    "gelu_tanh": _gate,
    "quick_gelu": lambda z: torch.sigmoid(constant("1.702", z) * z),
    "relu": torch.zeros_like,
    "silu": torch.sigmoid,
}
"""g of the activations that are z g(z), with g(-z) = 1 - g(z); called below zero alone, where it is accurate."""


TAIL = {"silu": -35.0, "quick_gelu": -35.0, "gelu": -35.0, "gelu_tanh": -12.0}
"""Below this z each activation is -e^{L(z)}; float64 loses it further down."""
_A, _B = math.sqrt(2 / math.pi), 0.044715
_MILLS = (-1.0, 5 / 2, -37 / 3, 353 / 4, -4081 / 5)  # the coefficients of log(z times Mills' ratio) in powers of 1/z^2
TINY = 1e-290
SLOPES = {"silu": 1.0, "quick_gelu": 1.702}
FADING = (*SLOPES, "gelu", "gelu_tanh")  # activations that vanish in their lower tail


def tanh_change(Z: Tensor, D: Tensor, d: Scaled) -> Scaled:
    """The difference `tanh(Z + D) - tanh(Z)`; D is d as an ordinary tensor, Z is per token or common to all."""
    Z = Z[:, None] if Z.ndim < D.ndim else Z
    slope, exponent = tanh_slope(Z, Z + D, D)
    largest = largest_log(exponent)
    return Scaled(d.value * slope * (exponent - spread(largest, exponent)).exp(), d.log + largest)


def tanh_slope(Z: Tensor, W: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
    """(a, b) of `tanh(W) - tanh(Z) = a e^b D`, D the difference W - Z."""
    # |D| - |Z| - |W|, without the digits that its terms lose to each other.
    exponent = torch.where((Z > 0) == (W > 0), -2 * torch.minimum(Z.abs(), W.abs()), 0.0)
    return 4 * sinh_share(D) / ((1 + (-2 * Z.abs()).exp()) * (1 + (-2 * W.abs()).exp())), exponent


def tanh_difference(Z: Tensor, W: Tensor, step: Scaled, weight: float = 1.0) -> Entries:
    """`tanh(W) - tanh(Z)` times a weight, where `step` is W - Z, cut as `as_tensor` does."""
    slope, exponent = tanh_slope(Z, W, as_tensor(step))
    size = Entries.of(step)
    return Entries(size.sign, size.log.clamp(max=math.log(HUGE))) * Entries.product(weight * slope, exponent)


def sinh_share(D: Tensor) -> Tensor:
    """The quotient `sinh(D) / (D e^|D|)`, 1 at D = 0."""
    return over(-torch.expm1(-2 * D.abs()), 2 * D.abs())


def faded(name: str, Z: Tensor, D: Tensor, d: Scaled) -> tuple[Scaled, Scaled]:
    """(act(Z), act(Z + D) - act(Z)) by the logs L, Z zero or in the lower tail, Z + D in it; D is d as a tensor."""
    at_zero = Z == 0  # act(0) is 0: the difference is the activation itself
    Z = torch.where(at_zero, torch.full_like(Z, TAIL[name]), Z)
    L, Z = _log(name, Z), Z[:, None]
    log_after = _log(name, torch.where(at_zero[:, None], D, Z + D).clamp(max=TAIL[name]))
    rise = torch.where(at_zero[:, None], log_after - L[:, None], D * _slope(name, Z, D))
    L = L.masked_fill(at_zero, -torch.inf)
    largest = torch.maximum(largest_log(L[:, None]), largest_log(log_after))
    weight = (L - largest[:, None]).exp()
    unit = spread(d.log.clamp(min=-600).exp(), D)
    large = (rise.abs() > 1) | at_zero[:, None]
    grown = ((log_after - spread(largest, log_after)).exp() - weight[:, None]) / unit
    small = weight[:, None] * d.value * _slope(name, Z, D) * over(torch.expm1(rise.clamp(max=2.0)), rise)
    return Scaled(-weight, largest), Scaled(-torch.where(large, grown, small), largest + d.log)


def _log(name: str, z: Tensor) -> Tensor:
    """L(z) of the module's docstring: the log of |act(z)| in the lower tail."""
    if name in SLOPES:
        return z.abs().log() + SLOPES[name] * z
    if name == "gelu_tanh":
        return z.abs().log() + 2 * _A * (z + _B * z**3)
    v = z.square().reciprocal()
    return -z.square() / 2 - 0.5 * math.log(2 * math.pi) + sum(c * v ** (k + 1) for k, c in enumerate(_MILLS))


def _slope(name: str, z: Tensor, d: Tensor) -> Tensor:
    """The quotient `(L(z + d) - L(z)) / d`, at d = 0 the derivative of L."""
    grows = over(torch.log1p((d / z).clamp(min=-1.0)), d / z) / z  # (log|z + d| - log|z|) / d
    if name in SLOPES:
        return grows + SLOPES[name]
    if name == "gelu_tanh":
        return grows + 2 * _A * (1 + _B * (3 * z.square() + 3 * z * d + d.square()))
    v, step = z.square().reciprocal(), torch.log1p((d / z).clamp(min=-1.0))
    slope = -(z + d / 2)
    for k, c in enumerate(_MILLS, 1):
        slope = slope - 2 * k * c * v**k * grows * over(torch.expm1(-2 * k * step), -2 * k * step)
    return slope


def over(a: Tensor, b: Tensor) -> Tensor:
    """The quotient a / b, one where |b| < 1e-290: subnormal numbers have too few digits for it."""
    gone = b.abs() < TINY
    return torch.where(gone, torch.ones_like(a), a / b.masked_fill(gone, 1.0))

"""Taylor coefficients of each activation at a point: `act(z + d) = sum_k f_k d^k`.

Each follows from the differential equation of its transcendental part, coefficient by coefficient; `f[k]` is
the k-th derivative over k!. They are taken at the common token alone, once per sample, so that the deviation
of every token costs a polynomial and no transcendental function.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

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

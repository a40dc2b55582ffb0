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

Series = list[Tensor]


def _product(u: Series, v: Series, k: int) -> Tensor:
    """The k-th coefficient of u v."""
    return torch.stack([u[i] * v[k - i] for i in range(k + 1)]).sum(0)


def _times_z(z: Tensor, u: Series) -> Series:
    """Coefficients of (z + d) u(d)."""
    return [z * u[0], *(z * u[k] + u[k - 1] for k in range(1, len(u)))]


def _gelu(z: Tensor, order: int) -> Series:
    """z Phi(z), with Phi' = phi and phi' = -z phi."""
    phi = [torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)]
    for k in range(order):
        before = phi[k - 1] if k else torch.zeros_like(z)
        phi.append(-(z * phi[k] + before) / (k + 1))
    Phi = [torch.special.ndtr(z), *(phi[k] / (k + 1) for k in range(order))]
    return _times_z(z, Phi)


def _sigmoid(z: Tensor, order: int) -> Series:
    """s' = s (1 - s)."""
    s = [torch.sigmoid(z)]
    for k in range(order):
        s.append((s[k] - _product(s, s, k)) / (k + 1))
    return s


def _silu(z: Tensor, order: int) -> Series:
    return _times_z(z, _sigmoid(z, order))


def _quick_gelu(z: Tensor, order: int) -> Series:
    s = _sigmoid(1.702 * z, order)
    return _times_z(z, [coefficient * 1.702**k for k, coefficient in enumerate(s)])


def _tanh_of(t: Tensor, inner: Series, order: int) -> Series:
    """T = tanh(u): T' = (1 - T^2) u'; `inner` are the coefficients of u'."""
    T = [t]
    one_less_square: Series = []
    for k in range(order):
        one_less_square.append((1.0 if k == 0 else 0.0) - _product(T, T, k))
        T.append(_product(one_less_square, inner, k) / (k + 1))
    return T


def _tanh(z: Tensor, order: int) -> Series:
    one, zero = torch.ones_like(z), torch.zeros_like(z)
    return _tanh_of(torch.tanh(z), [one] + [zero] * (order - 1), order)


def _gelu_tanh(z: Tensor, order: int) -> Series:
    """z (1 + tanh u) / 2, u = sqrt(2/pi) (z + 0.044715 z^3)."""
    a, b = math.sqrt(2 / math.pi), 0.044715
    zero = torch.zeros_like(z)
    slope = [a * (1 + 3 * b * z.square()), a * 6 * b * z, torch.full_like(z, a * 3 * b)]
    T = _tanh_of(torch.tanh(a * (z + b * z**3)), (slope + [zero] * order)[:order], order)
    half = [(1 + T[0]) / 2, *(coefficient / 2 for coefficient in T[1:])]
    return _times_z(z, half)


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

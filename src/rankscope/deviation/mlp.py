"""The MLP of a state: what an activation does to a common token and to deviations from it.

    act(z + d) - act(z) = d (f_1 + f_2 d + f_3 d^2 + ...)

with the Taylor coefficients f_k at the common token (`series.py`): no two nearly equal numbers are
subtracted. Where the largest |d| (1 + |z|) of a sample is above `LARGE`, the plain difference is as good and
is taken.
Every activation here is 0 at 0, and beyond 1e+-108 linear on each side of 0 (tanh: constant), so that scales
outside floating point's range can be drawn out of it.
"""

import torch
from torch import Tensor

from rankscope.deviation.scaled import STEEPEST, Scaled, chosen
from rankscope.deviation.series import SERIES, VALUES
from rankscope.deviation.state import State
from rankscope.doubled import near_log, precision
from rankscope.nets.architecture import Architecture
from rankscope.nets.weights import Layer, Linear

LARGE = 0.02
TAIL = 1e3
"""From here on activations are linear on either side of 0 (tanh: constant), to all of float64's digits."""
REACH = 250.0
"""Logs within which activations are evaluated as they are."""


def mlp(arch: Architecture, layer: Layer, state: State) -> State:
    """The MLP branch: `act(X W_1 + b_1) W_2 + b_2`, or gated by the product rule."""
    w = layer.mlp
    assert w is not None
    x, R = affine(state.x, w.up), state.R.mapped(lambda v: v @ w.up.weight)
    if w.gate is None:
        x, R = activation(arch.activation, x, R)
    else:
        gate = w.gate
        a, A = activation(arch.activation, affine(state.x, gate), state.R.mapped(lambda v: v @ gate.weight))
        # act(g) u - act(g_0) u_0 = (act(g) - act(g_0)) u_0 + act(g_0) (u - u_0) + the product of both
        R = _times(A, _rows(x)) + _times(_rows(a), R) + _times(A, R)
        x = _times(a, x)
    return State(affine(x, w.down), R.mapped(lambda v: v @ w.down.weight), state.real, state.doubt)


def affine(x: Scaled, linear: Linear) -> Scaled:
    """`x W + b` of the common token."""
    y = x.mapped(lambda v: v @ linear.weight)
    if linear.bias is None:
        return y
    return y + Scaled.plain(linear.bias.expand_as(y.value)).normalised()  # zeros do not set the scale


def activation(name: str, z: Scaled, d: Scaled) -> tuple[Scaled, Scaled]:
    """(act(z), act(z + d) - act(z)), z `[batch, width]`, d `[batch, token, width]`."""
    size = d.largest()
    log = torch.maximum(z.normalised().log, d.log + near_log(size.clamp(min=1e-300)))
    outside = log - log.clamp(-REACH, REACH)
    # Drawn out of the activation: all of it where it is linear; nothing where it is constant.
    drawn = outside.clamp(max=0.0) if name == "tanh" else outside
    Z, D = z.at(outside), d.at(outside)
    act = VALUES[name]
    common = act(Z)
    # In an activation's tail the terms of its series grow with |z|.
    reach = size * (d.log - outside).clamp(max=STEEPEST).exp() * (1 + Z.abs().amax(-1).clamp(max=50.0))
    large = reach > LARGE
    if bool(large.all()):
        return Scaled(common, drawn), Scaled(_plain(name, Z, D), drawn)
    # e^(d.log) d (f_1 + f_2 D + ...), D the same d in units of one; drawn - outside is 0 unless constant.
    quotient = _quotient(name, Z, D, min(float(reach.max()), LARGE) if len(reach) else 0.0)
    change = Scaled(d.value * quotient, d.log + drawn - outside)
    if bool(large.any()):
        change = chosen(large, Scaled(_plain(name, Z, D), drawn), change)
    return Scaled(common, drawn), change


def _plain(name: str, Z: Tensor, D: Tensor) -> Tensor:
    """`act(Z + D) - act(Z)` for large D; far out in a tail, where D may be lost beside Z, by the slope."""
    act = VALUES[name]
    plain = act(Z[:, None] + D) - act(Z)[:, None]
    if not bool((Z.abs() > TAIL).any()):
        return plain
    slope = SERIES[name](Z, 1)[1][:, None]
    return torch.where(Z.abs()[:, None] > TAIL + 2 * D.abs(), slope * D, plain)


def _quotient(name: str, Z: Tensor, D: Tensor, reach: float) -> Tensor:
    """`(act(Z + D) - act(Z)) / D` for small D, by as many terms as the largest of them needs."""
    if name == "relu":
        # Linear but where D crosses zero.
        slope = SERIES[name](Z, 1)[1][:, None].expand_as(D)
        crosses = (Z[:, None] > 0) != (Z[:, None] + D > 0)
        exact = (torch.relu(Z[:, None] + D) - torch.relu(Z)[:, None]) / D.masked_fill(D == 0, 1.0)
        return torch.where(crosses & (D != 0), exact, slope)
    enough = 500 * precision(D)
    order = next(k for k in range(1, 20) if reach**k < enough or k == 19)
    f = SERIES[name](Z, order)
    result = f[order][:, None].expand_as(D)
    for k in range(order - 1, 0, -1):
        result = torch.addcmul(f[k][:, None], D, result)
    return result


def _rows(x: Scaled) -> Scaled:
    """The common token as a row to be multiplied with every token's."""
    return x.mapped(lambda v: v[:, None])


def _times(u: Scaled, v: Scaled) -> Scaled:
    return Scaled(u.value * v.value, u.log + v.log).normalised()

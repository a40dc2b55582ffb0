"""The MLP of a state, and what its activation does to a common token and to deviations from it.

    act(z + d) - act(z) = d (f_1 + f_2 d + f_3 d^2 + ...)

with the Taylor coefficients f_k at the common token (`activations.py`): no two nearly equal numbers are
subtracted. Where the largest |d| (1 + |z|) of a sample is above `LARGE`, the plain difference is as good and
is taken. `mlp` is called by `rules.py` and `experts.py`, `affine` and `product` by every file with products.
Every activation here is 0 at 0, and beyond 1e+-108 linear on each side of 0 (tanh: constant), so that scales
outside floating point's range can be drawn out of it.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rankscope.deviation.activations import FADING, GATES, SERIES, TAIL, VALUES, faded, tanh_change
from rankscope.deviation.decisions import piecewise, terms_needed
from rankscope.deviation.state import LOWEST, STEEPEST, Scaled, State, chosen, spread
from rankscope.doubled import near_log, nearest, precision
from rankscope.nets import Architecture, Linear, MLPWeights

LARGE = 0.02  # the largest |d| (1 + |z|) for which the Taylor series is summed
LINEAR = 1e3  # beyond this |z| activations are linear on either side of 0 (tanh: constant), to all of float64's digits
GatePair = Callable[[Scaled, Scaled], tuple[Scaled, Scaled]]
MOST_TERMS = 19
REACH = 250.0  # the |log| of the size of z and d within which activations are evaluated as they are
SUNK = 300.0
"""By how much the log of products may lie below that of their factors. Below, what is left may be less than what
underflowed on the way: a unit that is open where its other factor is zero sets the scale of all the others."""


def mlp(
    arch: Architecture,
    w: MLPWeights,
    state: State,
    perturb: Callable[[Scaled], Scaled] = lambda part: part,
    limit: float = 0.0,
) -> State:
    """The MLP branch `act(X W_1 + b_1) W_2 + b_2`, or the gated one `(act(X W_g + b_g) * (X W_1 + b_1)) W_2 + b_2`,
    under a `limit` L as `nets.Experts` has it: `(act(min(X W_g + b_g, L)) * (1 + X W_1 + b_1, cut to +-L)) W_2 + b_2`.
    `perturb` moves the last digits of what goes into the activation and of what comes out."""
    x, R = perturb(affine(state.x, w.up)), perturb(state.R.mapped(lambda v: v @ w.up.weight))
    if w.gate is None:
        x, R = map(perturb, activation(arch.activation, x, R))
    else:
        gate = w.gate
        z, d = perturb(affine(state.x, gate)), perturb(state.R.mapped(lambda v: v @ gate.weight))
        if limit:
            (z, d), (x, R) = clamped(z, d, -math.inf, limit), clamped(x, R, -limit, limit)
            x = x + Scaled.plain(torch.ones_like(x.value))

        def act(z: Scaled, d: Scaled) -> tuple[Scaled, Scaled]:
            a, A = activation(arch.activation, z, d)
            return perturb(a), perturb(A)

        x, R = _gated(act, z, d, x, R)
    return State(affine(x, w.down), R.mapped(lambda v: v @ w.down.weight), state.valid)


def _gated(act: GatePair, z: Scaled, d: Scaled, x: Scaled, R: Scaled) -> tuple[Scaled, Scaled]:
    """(act(z) x, act(z + d) (x + R) - act(z) x), units that underflow at scales of their own.

    Args:
        act: Gives (act(z), act(z + d) - act(z)).
        z: What the gates of the common token are made of, `[batch, unit]`.
        d: What tokens add to z, `[batch, token, unit]`.
        x: What gates are multiplied with, of the common token.
        R: What tokens add to x.
    """
    a, A = act(z, d)
    common, rest = _products(a, A, x, R)
    logs = torch.stack([A.log + x.log, a.log + R.log, A.log + R.log]).amax(0)
    sunk = (rest.log < logs - SUNK) & (torch.maximum(d.log, R.log) > LOWEST) | (common.log < a.log + x.log - SUNK)

    def by_entry() -> tuple[Scaled, Scaled]:
        shape = R.value.shape
        of_z, of_d, of_x, of_R = (_by_entry(part, shape) for part in (rows(z), d, rows(x), R))
        a, A = act(of_z.mapped(lambda v: v[:, 0]), of_d)
        fine, fine_rest = _products(a, A, of_x.mapped(lambda v: v[:, 0]), of_R)
        return _from_entries(fine, shape).mapped(lambda v: v[:, 0]), _from_entries(fine_rest, shape)

    return piecewise("mlp.sunk", sunk, by_entry, (common, rest))


def _products(a: Scaled, A: Scaled, x: Scaled, R: Scaled) -> tuple[Scaled, Scaled]:
    """(a x, (a + A_i) (x + R_i) - a x) = (a x, A_i x + a R_i + A_i R_i), entry by entry."""
    return product(a, x), product(A, rows(x)) + product(rows(a), R) + product(A, R)


def _by_entry(part: Scaled, shape: torch.Size) -> Scaled:
    """Numbers as samples of one token and one unit each, at scales of their own; those of one token are repeated."""
    value = part.value.expand(shape)
    log = spread(part.log, value).expand(shape)
    return Scaled(value.reshape(-1, 1, 1), log.reshape(-1)).normalised()


def _from_entries(part: Scaled, shape: torch.Size) -> Scaled:
    """Numbers of samples of one entry as `[batch, token, unit]` again, at the scale of each sample's largest."""
    log = part.log.view(shape)
    largest = log.flatten(1).amax(1)
    return Scaled(part.value.view(shape) * (log - spread(largest, log)).exp(), largest)


def clamped(z: Scaled, d: Scaled, least: float, most: float) -> tuple[Scaled, Scaled]:
    """(c(z), c(z + d) - c(z)) of c that cuts off below `least` < 0 and above `most` > 0. Between them the difference is
    d, beyond them 0; where d crosses one of them, it is as exact as z is beside it."""
    cut = (torch.maximum(z.log, d.log) - STEEPEST).clamp(min=0.0)  # both in units of e^cut, however large they are
    Z, D, unit = z.at(cut)[:, None], d.at(cut), spread((-cut).exp(), d.value)
    low, high = (torch.full_like(unit, bound) if math.isinf(bound) else bound * unit for bound in (least, most))
    before, after = (torch.maximum(torch.minimum(v, high), low) for v in (Z, Z + D))
    beyond = before != Z
    crossed = beyond | (after != Z + D)
    common = chosen(beyond.flatten(1).any(1), Scaled(before[:, 0], cut), z)
    kept = Scaled(d.value.masked_fill(crossed, 0.0), d.log).normalised()
    return common, kept + Scaled((after - before).masked_fill(~crossed, 0.0), cut).normalised()


def affine(x: Scaled, linear: Linear) -> Scaled:
    """The common token through a linear map, `x W + b`."""
    y = x.mapped(lambda v: v @ linear.weight)
    if linear.bias is None:
        return y
    return y + Scaled.plain(linear.bias.expand_as(y.value)).normalised()  # zeros do not set the scale


def activation(name: str, z: Scaled, d: Scaled) -> tuple[Scaled, Scaled]:
    """(act(z), act(z + d) - act(z)) of an activation, z `[batch, width]`, d `[batch, token, width]`.

    Scales beyond float64's range are drawn out of the activation first: e^outside, as a log per sample."""
    size = d.largest()
    log = torch.maximum(z.normalised().log, d.log + near_log(size.clamp(min=1e-300)))
    outside = log - log.clamp(-REACH, STEEPEST if name == "tanh" else REACH)
    # Drawn out of the activation: all of it where it is linear; nothing where it is constant.
    drawn = outside.clamp(max=0.0) if name == "tanh" else outside
    Z, D = z.at(outside), d.at(outside)
    common = _act(name, Z, outside)
    if name == "tanh":
        # Drawn - outside is 0 unless constant: there d goes on as large as it is.
        change = tanh_change(Z, D, Scaled(d.value, d.log))
        return Scaled(common, drawn), Scaled(change.value, change.log + drawn - outside)
    values = Scaled(common, drawn), _drawn(name, Z, D, d, outside, drawn)
    if name not in FADING or not D.shape[1]:
        return values
    # Samples whose every unit, of the common token and of every token, lies in the activation's tail.
    low, tail = Z.lt(TAIL[name]).all(-1) | (Z == 0).all(-1), TAIL[name]
    gone = piecewise("mlp.low", low, lambda: (Z[:, None] + D).flatten(1).amax(1) < tail, torch.zeros_like(low))

    def away() -> tuple[Scaled, Scaled]:
        x, R = faded(name, Z, D, Scaled(d.value, d.log - outside))
        return Scaled(x.value, x.log + drawn), Scaled(R.value, R.log + drawn)

    return piecewise("mlp.faded", gone, away, values)


def _drawn(name: str, Z: Tensor, D: Tensor, d: Scaled, outside: Tensor, drawn: Tensor) -> Scaled:
    """The difference act(z + d) - act(z), with Z = z e^-outside and D = d e^-outside in float64's range: by
    the Taylor series where d is small, else as a plain difference; e^drawn is the scale drawn out of act."""
    size = d.largest()
    # In an activation's tail the terms of its series grow with |z|.
    reach = size * (d.log - outside).clamp(max=STEEPEST).exp() * (1 + Z.abs().amax(-1).clamp(max=50.0))

    def series() -> Scaled:  # e^(d.log) d (f_1 + f_2 D + ...), D the same d in units of one
        quotient = _quotient(name, Z, D, reach.clamp(max=LARGE))
        if name in FADING:  # a change below float64's range is small beside any Z: there the slope
            quotient = piecewise("mlp.slope_outside", outside > 0, exact, quotient)
        return Scaled(d.value * quotient, d.log + drawn - outside)

    def exact() -> Tensor:
        slope = SERIES[name]((Z * spread(outside.clamp(0.0, 690.0).exp(), Z)).clamp(-LINEAR, LINEAR), 1)[1]
        return torch.where(D == 0, slope[:, None], _plain(name, Z, D, outside) / D.masked_fill(D == 0, 1.0))

    return piecewise("mlp.large", reach > LARGE, lambda: Scaled(_plain(name, Z, D, outside), drawn), series)


def _act(name: str, z: Tensor, outside: Tensor) -> Tensor:
    """act(e^outside z) / e^outside; an entry that is small beside the others of its sample may not be in the
    linear range, and is brought back to size one."""
    if name not in FADING:
        return VALUES[name](z)

    def grown() -> Tensor:
        grow = spread(outside.clamp(0.0, 690.0).exp(), z)
        x = (z * grow).clamp(-2 * LINEAR, 2 * LINEAR)
        return torch.where(x.abs() > LINEAR, z.clamp(min=0.0), VALUES[name](x) / grow)

    return piecewise("mlp.value_outside", outside > 0, grown, lambda: VALUES[name](z))


IN_CACHE = 2**18  # entries that are processed together on a CPU, so that they stay in its cache


def _plain(name: str, Z: Tensor, D: Tensor, outside: Tensor) -> Tensor:
    """The difference `act(Z + D) - act(Z)` for large D, of an activation act(z) = z g(z): it is
    `D g(Z + D) + Z (g(Z + D) - g(Z))`, so that a D that is small beside Z keeps its digits. g is taken on the
    side where it is small: g(z) = 1 - g(-z)."""
    if name not in GATES:
        return D
    if type(D) is Tensor and D.device.type == "cpu" and D.numel() > IN_CACHE:
        # A dozen passes over what fits into a core's cache are quicker than over memory.
        parts = torch.split(D, max(1, IN_CACHE * D.shape[1] // D.numel()), 1)
        return torch.cat([_plain_part(name, Z, part, outside) for part in parts], 1)
    return _plain_part(name, Z, D, outside)


def _plain_part(name: str, Z: Tensor, D: Tensor, outside: Tensor) -> Tensor:
    """`_plain` of some of the tokens."""
    Z = Z[:, None]
    W = Z + D

    def grown() -> tuple[Tensor, ...]:
        grow = spread(outside.clamp(0.0, 690.0).exp(), D)
        return tuple(GATES[name](-(V * grow).abs().clamp(max=2 * LINEAR)) for V in (W, Z))

    def gates() -> tuple[Tensor, ...]:
        return tuple(GATES[name](-V.abs()) for V in (W, Z))

    after, before = piecewise("mlp.outside", outside > 0, grown, gates)
    low = W < 0
    change = torch.addcmul(Z * (after - before), D, after)
    change = torch.where(low, change, D - change)
    return torch.where(low == (Z < 0), change, change - Z.abs() * (1 - 2 * before))


def _quotient(name: str, Z: Tensor, D: Tensor, reach: Tensor) -> Tensor:
    """The quotient `(act(Z + D) - act(Z)) / D = f_1 + f_2 D + ...` for small D, f_k the Taylor coefficients at Z, to
    the terms that `reach` needs: the largest |D| (1 + |Z|) of each sample, cut off at LARGE (`_drawn` does not use the
    result where it is above)."""
    if name == "relu":
        # Linear but where D crosses zero.
        slope = SERIES[name](Z, 1)[1][:, None].expand_as(D)
        crosses = (Z[:, None] > 0) != (Z[:, None] + D > 0)
        exact = (torch.relu(Z[:, None] + D) - torch.relu(Z)[:, None]) / D.masked_fill(D == 0, 1.0)
        return torch.where(crosses & (D != 0), exact, slope)
    powers = nearest(reach)[:, None] ** torch.arange(1, MOST_TERMS, device=reach.device)
    order = terms_needed("mlp.terms", (~(powers < 500 * precision(D))).any(0).sum() + 1, MOST_TERMS)
    f = SERIES[name](Z, order)
    result = f[order][:, None].expand_as(D)
    for k in range(order - 1, 0, -1):
        result = torch.addcmul(f[k][:, None], D, result)
    return result


def rows(x: Scaled) -> Scaled:
    """Numbers of the common token with an axis of one token, to be multiplied with every token's."""
    return x.mapped(lambda v: v[:, None])


def product(u: Scaled, v: Scaled) -> Scaled:
    """The product u v of scaled numbers, entry by entry."""
    return Scaled(u.value * v.value, u.log + v.log).normalised()

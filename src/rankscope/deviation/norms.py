"""Norms of a state: `x / sd(x)` of every token, without subtracting two normalised rows.

A token is `c + r`, c the common token and r its deviation (both centred over the width for LayerNorm). Split
`r = alpha c + w` with w orthogonal to c. With `v = |.|^2 / d` (or `|.|^2` for scale-only),

    sd_0^2 = v(c) + eps,    sd_i^2 = (1 + alpha)^2 v(c) + v(w) + eps,
    out_i - out_0 = w / sd_i + c ((1 + alpha) / sd_i - 1 / sd_0),
    (1 + alpha) / sd_i - 1 / sd_0 = (alpha (2 + alpha) eps - v(w)) / (sd_i sd_0 ((1 + alpha) sd_0 + sd_i)).

The radial part alpha, which a norm removes, drops out exactly: what is left of it is of order eps. Where
tokens differ by more than `LARGE` of their size, the plain difference is as good and is taken.

Called by `rules.py` for the norms of a block, by `scores.py` for those of queries and keys, by `propagate.py`
for the final norm. `normed` asks the norm for its rule; those built in call back `root_mean_square`.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rankscope.deviation.decisions import must_compute, piecewise
from rankscope.deviation.state import LOWEST, STEEPEST, PerturbTensor, Scaled, State, ValidTokens, spread
from rankscope.errors import ArchitectureError
from rankscope.nets import Norm, NormWeights, norm_of

LARGE = 0.05  # the largest deviation, in lengths of the common token, for which the formula above is used
SHORTEST = 1e-240  # the square of a token's length below which float64 loses it


def normalise(state: State, kind: str | Norm, weights: NormWeights, eps: float) -> State:
    """The state with every token normalised, and tidy (`State.tidy`)."""
    return normed(state, kind, weights, eps).tidy()


def normed(
    state: State, kind: str | Norm, weights: NormWeights, eps: float, perturb: PerturbTensor | None = None
) -> State:
    """The state with every token normalised, times gain plus bias, not yet tidy. `perturb` moves the last
    digits of what is subtracted from r: its part alpha c."""
    norm = norm_of(kind)
    if norm is None:
        return state
    rule = norm.deviation_rule
    if rule is None:
        sentence = f"norm {norm.name} must have a rule in deviation arithmetic; it has a length of its own and none"
        raise ArchitectureError(f"{sentence}: use arithmetic='float64', or give Norm(deviation=...)", subject="norm")
    result = rule(state, eps, StateNormOperations(perturb))
    x, R = result.x, result.R
    if weights.gain is not None:
        gain = weights.gain
        x, R = x.mapped(lambda v: v * gain), R.mapped(lambda v: v * gain)
    if weights.bias is not None:
        x = x + Scaled.plain(weights.bias.expand_as(x.value)).normalised()  # zeros do not set the scale
    return State(x, R, state.valid)


@dataclass(frozen=True)
class StateNormOperations:
    """What the deviation rule of a norm is made of (`NormOperations` of `nets/norms.py`)."""

    perturb: PerturbTensor | None

    def root_mean_square(self, state: State, eps: float, *, centred: bool, averaged: bool) -> State:
        """Divide every token by the root of its (mean) square and eps, without subtracting two normalised rows."""
        c, r = state.x, state.R
        if centred:
            c, r = (part.mapped(lambda v: v - v.mean(-1, keepdim=True)).normalised() for part in (c, r))
        count = c.value.shape[-1] if averaged else 1
        length = torch.linalg.vector_norm(c.value, dim=-1)
        longest = torch.linalg.vector_norm(r.value, dim=-1).amax(-1) if r.value.shape[1] else length * 0
        large = longest * (r.log - c.log).clamp(-600, 600).exp() > LARGE * length
        small = partial(_small, c, r, state.valid, count, eps, self.perturb)
        x, R = piecewise("norms.large", large, partial(_plain, c, r, state.valid, count, eps), small)
        return State(x, R, state.valid)


def _small(
    c: Scaled, r: Scaled, valid: ValidTokens, count: int, eps: float, perturb: PerturbTensor | None
) -> tuple[Scaled, Scaled]:
    """Tokens c + r over their sd by the module's formula, r small beside c; `count` is d, or 1 for scale-only."""
    # The log of the larger of e^(c.log) and sqrt(eps): the scale at which sd is of size one.
    unit = c.log.clamp(min=0.5 * float(torch.tensor(eps, dtype=torch.float64).log())) if eps > 0 else c.log
    step = (r.log - c.log).clamp(max=STEEPEST).exp()[:, None]  # e^(s - a)
    shrink = (2 * (c.log - unit)).exp()[:, None]
    rest = (eps * (-2 * unit).exp())[:, None] if eps > 0 else torch.zeros_like(shrink)
    square = c.value.square().sum(-1, keepdim=True)  # [batch, 1]
    slope = (r.value @ c.value[..., None])[..., 0] / square.masked_fill(square == 0, 1.0)  # alpha / step
    if perturb is None:
        w = torch.addcmul(r.value, slope[..., None], c.value[:, None], value=-1)
    else:
        w = r.value - perturb(slope[..., None] * c.value[:, None])
    alpha, spread_w = slope * step, torch.linalg.vector_norm(w, dim=-1).square() / count
    sd_0 = _positive(square / count * shrink + rest).sqrt()
    sd = _positive(((1 + alpha).square() * square / count + spread_w * step.square()) * shrink + rest).sqrt()
    turn = (slope * (2 + alpha) * rest - spread_w * step * shrink) / (sd * sd_0 * ((1 + alpha) * sd_0 + sd))
    deviation = torch.addcmul(w / sd[..., None], turn[..., None], c.value[:, None])
    return Scaled(c.value / sd_0, c.log - unit), Scaled(valid.zero_padding(deviation), r.log - unit)


def _positive(variance: Tensor) -> Tensor:
    """Variances with one in place of zero, so that a token of length zero stays zero."""
    return variance.masked_fill(variance == 0, 1.0)


def _plain(c: Scaled, r: Scaled, valid: ValidTokens, count: int, eps: float) -> tuple[Scaled, Scaled]:
    """Tokens c + r over their sd, each formed and divided by itself, with no common token; where lengths of
    tokens are 1e120 apart, each token is taken in units of its own largest entry first."""
    log = torch.maximum(c.log, r.log)
    Y = piecewise("norms.common_token", c.log > LOWEST, lambda: c.at(log)[:, None] + r.at(log), lambda: r.at(log))
    square = torch.linalg.vector_norm(Y, dim=-1, keepdim=True).square() / count  # [batch, token, 1]
    unit = spread(log, square).expand_as(square)
    if must_compute("norms.shortest", ((square < SHORTEST) & valid.mask[..., None])):
        size = Y.abs().amax(-1, keepdim=True)
        size = size.masked_fill(size == 0, 1.0)
        Y, unit = Y / size, unit + size.log()
        square = torch.linalg.vector_norm(Y, dim=-1, keepdim=True).square() / count
    left, scale = Y, torch.zeros_like(log)
    if eps > 0:
        # What is shorter than sqrt(eps) keeps its length in units of that.
        shrunk = (unit - 0.5 * math.log(eps)).clamp(max=0.0)
        square = square * (2 * shrunk).exp() + eps * (2 * (shrunk - unit)).exp()

        def shorter() -> tuple[Tensor, Tensor]:
            scale = shrunk.masked_fill(~valid.mask[..., None], -torch.inf).flatten(1).amax(1).clamp(min=LOWEST)
            return Y * (shrunk - spread(scale, shrunk)).clamp(max=0.0).exp(), scale

        left, scale = piecewise("norms.shrunk", (shrunk < 0).flatten(1).any(1), shorter, (left, scale))
    R = Scaled(valid.zero_padding(left / _positive(square).sqrt()), scale).normalised()
    return Scaled(torch.zeros_like(c.value), torch.full_like(log, LOWEST)), R

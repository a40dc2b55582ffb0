"""Angles between tokens: cos(x_i, x_j) over the pairs i < j of valid tokens.

A token of zero length points nowhere: its cosines are 0. One token alone agrees with itself: 1.
No token: NaN. The gaps `1 - cos` are computed as `|u_i - u_j|^2 / 2` of the unit vectors, so that they can be
resolved down to the square of the arithmetic's floor.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rankscope.metrics import rows
from rankscope.metrics.base import (
    ROUNDING,
    Meaning,
    Metric,
    Reading,
    Tokens,
    TokensLike,
    Values,
    nan_where_empty,
    tokens,
)
from rankscope.metrics.log_readings import LOWEST, SMALLEST, UNIT, ScaledTokens, log_of, reading_of_tokens
from rankscope.metrics.norms import frobenius_norm, largest_square_distance
from rankscope.metrics.residuals import log_residual
from rankscope.shapes import Bool, Float

AT_ONCE = 2**26  # bytes of cosines that are held at once


def cosines(
    X: TokensLike, padding: Tensor | None = None
) -> tuple[Float[Tensor, "*batch token token"], Bool[Tensor, "*batch token token"]]:
    """All cosines, and which of them are pairs i < j of valid tokens."""
    direction, _, valid = _directions(X, padding)
    cosine = (direction @ direction.mT).clamp(-1.0, 1.0)
    pairs = (valid[..., :, None] & valid[..., None, :]).triu(1)
    return cosine, pairs


def _directions(X: TokensLike, padding: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(unit vectors, largest entries, which count); a zero token keeps its zero."""
    ready = tokens(X, padding)
    size = ready.X.abs().amax(-1, keepdim=True) if ready.X.shape[-1] else ready.X.new_zeros((*ready.X.shape[:-1], 1))
    unit = ready.X / size.masked_fill(size == 0, 1.0)  # squares could leave the range
    length = torch.linalg.vector_norm(unit, dim=-1, keepdim=True)
    return unit / length.masked_fill(length == 0, 1.0), size, ready.valid


def mean_cosine(X: TokensLike, padding: Tensor | None = None) -> Values:
    """The mean of cos(x_i, x_j) over pairs: of unit vectors u, `(|sum u|^2 - sum |u|^2) / 2` by their number.

    >>> mean_cosine(torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]]))
    tensor(0.3333, dtype=torch.float64)
    """
    ready = tokens(X, padding)
    direction = _directions(ready)[0]
    total = direction.sum(-2).square().sum(-1) - direction.square().sum((-2, -1))
    return _over_pairs(total / 2, ready)


def mean_abs_cosine(X: TokensLike, padding: Tensor | None = None, *, at_once: int = AT_ONCE) -> Values:
    """The mean of |cos(x_i, x_j)| over pairs (Wu et al. 2024, figure 4)."""
    ready = tokens(X, padding)
    direction, _, _ = _directions(ready)
    total = direction.new_zeros(direction.shape[:-2])
    for block, pairs in _blocks(ready, at_once):
        cosine = (direction[..., block, :] @ direction.mT).abs_().clamp_(max=1.0)
        total += cosine.masked_fill_(~pairs, 0.0).sum((-2, -1))
    return _over_pairs(total, ready)


def min_cosine(X: TokensLike, padding: Tensor | None = None, *, at_once: int = AT_ONCE) -> Values:
    """The smallest cosine of any pair: Cor 1 of Wu et al. 2024 asks that it start above 0."""
    ready = tokens(X, padding)
    direction, _, _ = _directions(ready)
    lowest = direction.new_ones(direction.shape[:-2])
    for block, pairs in _blocks(ready, at_once):
        cosine = (direction[..., block, :] @ direction.mT).clamp_(-1.0, 1.0)
        lowest = torch.minimum(lowest, cosine.masked_fill_(~pairs, 1.0).amin((-2, -1)))
    return nan_where_empty(lowest, ready)


def mean_cosine_gap(X: TokensLike, padding: Tensor | None = None) -> Values:
    """`1 - mean cos(x_i, x_j)`: 0 when all tokens point one way. Of m unit vectors the squared distances of
    all pairs are `m sum |u_i - mean u|^2`; a token that points nowhere is at 1 from every other."""
    ready = tokens(X, padding)
    direction, size, valid = _directions(ready)
    points = (size[..., 0] != 0) & valid
    m = points.sum(-1)
    if not direction.shape[-2]:
        return nan_where_empty(direction.new_zeros(m.shape), ready)
    apart = _from_first(direction, points)
    mean = apart.sum(-2, keepdim=True) / m.clamp(min=1)[..., None, None]
    square = (apart - mean).masked_fill(~points[..., None], 0.0).square().sum((-2, -1))
    pairs = [count * (count - 1) // 2 for count in (ready.count, m)]
    return nan_where_empty((m * square / 2 + (pairs[0] - pairs[1])) / pairs[0].clamp(min=1), ready)


def max_cosine_gap(X: TokensLike, padding: Tensor | None = None, *, at_once: int = AT_ONCE) -> Values:
    """The largest gap, `1 - min cos(x_i, x_j)`."""
    ready = tokens(X, padding)
    direction, size, valid = _directions(ready)
    points = (size[..., 0] != 0) & valid
    if not direction.shape[-2]:
        return nan_where_empty(direction.new_zeros(direction.shape[:-2]), ready)
    gap = largest_square_distance(_from_first(direction, points), at_once) / 2
    nowhere = (valid & ~points).any(-1) & (ready.count > 1)
    return nan_where_empty(torch.where(nowhere, gap.clamp(min=1.0), gap), ready)


def _from_first(direction: Tensor, points: Tensor) -> Tensor:
    """Unit vectors less the first one, so that equal ones are exactly zero; zero where a token points nowhere."""
    first = points.to(torch.int8).argmax(-1)[..., None, None].expand(*points.shape[:-1], 1, direction.shape[-1])
    return (direction - direction.gather(-2, first)).masked_fill(~points[..., None], 0.0)


def _blocks(ready: Tokens, at_once: int) -> Iterator[tuple[slice, Bool[Tensor, "*batch row token"]]]:
    """Tokens a block at a time, and which of its rows' cosines are of pairs i < j of valid tokens."""
    n = ready.X.shape[-2]
    step = max(1, at_once // max(1, 8 * n * ready.count.numel()))
    for start in range(0, n, step):
        block = slice(start, min(n, start + step))
        yield block, (ready.valid[..., block, None] & ready.valid[..., None, :]).triu(1 + start)


def _over_pairs(total: Values, ready: Tokens) -> Values:
    pairs = ready.count * (ready.count - 1) // 2
    return nan_where_empty((total / pairs.clamp(min=1)).masked_fill(pairs == 0, 1.0), ready)


def _gap_rule(tokens: ScaledTokens, gap: Callable[..., Tensor], square: Callable[[Tensor, Tensor], Tensor]) -> Reading:
    """`|u_i - u_j|^2 / 2` of the unit vectors u, whose residual is that of a norm."""
    plain = Metric("gap", gap, power=2).read(tokens.tokens, tokens.padding, unit=UNIT)
    u = tokens.directions
    log = log_of(square(u.value, ~tokens.padding), 2 * u.log)
    fine = reading_of_tokens(log, tokens)
    # Directions are known to the rounding of what tokens differ by.
    known_to = log_residual(tokens, "frobenius", relative=True) + math.log(ROUNDING * UNIT)
    unknown = log <= 2 * known_to
    floor = fine.floor.masked_fill(unknown & (log > LOWEST), SMALLEST)
    floor = torch.maximum(floor, fine.value * (floor > 0))
    # Far apart, tokens are read as they are: one of them may be zero and point nowhere.
    close = tokens.close
    pairs = (fine.value, plain.value), (fine.log10, plain.log10), (floor, plain.floor)
    return Reading(*(torch.where(close, near, far) for near, far in pairs))


def _mean_square(u: Tensor, valid: Tensor) -> Tensor:
    """Half the mean squared distance of all pairs of unit vectors, from their residual."""
    return frobenius_norm(u).square() / (valid.sum(-1).double() - 1).clamp(min=1)


def _largest_square(u: Tensor, valid: Tensor) -> Tensor:
    """Half the largest squared distance of two tokens of each sample."""
    return largest_square_distance(u.masked_fill(~valid[..., None], 0.0), rows.AT_ONCE) / 2


def _metric(compute: Callable[..., Tensor], symbol: str, tex: str, meaning: Meaning, **more: Any) -> Metric:
    """A metric of angles: a short token whose direction rounding decided counts as much as a long one."""
    name = compute.__name__
    return Metric(name, compute, symbol, tex, sensitive_to="directions", meaning=meaning, **more)


_MEAN, _MIN = r"\mathrm{mean}\,\cos(x_i, x_j)", r"\min\,\cos(x_i, x_j)"
_ONE_WAY = "all tokens point the same way"
METRICS = [
    _metric(mean_cosine, "mean cos(xᵢ, xⱼ)", _MEAN, direction=-1,
        meaning=Meaning("-1/(n - 1) to 1", "tokens point in all directions", f"{_ONE_WAY} (1)",
            "It does not see lengths: tokens of other lengths on one ray have cosine 1.", equal="1")),
    _metric(mean_abs_cosine, "mean |cos(xᵢ, xⱼ)|", r"\mathrm{mean}\,|\cos(x_i, x_j)|", direction=-1,
        meaning=Meaning(
            "0 to 1", "tokens are orthogonal to each other", "all tokens lie on one line through zero (1)",
            "Two tokens that point opposite ways count as one.", equal="1")),
    _metric(mean_cosine_gap, "1 − mean cos(xᵢ, xⱼ)", f"1 - {_MEAN}", power=2, direction=1,
        rule=partial(_gap_rule, gap=mean_cosine_gap, square=_mean_square),
        meaning=Meaning("0 to n/(n - 1)", _ONE_WAY, "tokens point in all directions",
            "1 - mean_cosine, without losing digits where that is near 1.", equal="0")),
    _metric(max_cosine_gap, "1 − min cos(xᵢ, xⱼ)", f"1 - {_MIN}", power=2, direction=1,
        rule=partial(_gap_rule, gap=max_cosine_gap, square=_largest_square),
        meaning=Meaning("0 to 2", _ONE_WAY, "two tokens point opposite ways", equal="0")),
    _metric(min_cosine, "min cos(xᵢ, xⱼ)", _MIN, direction=-1,
        meaning=Meaning("-1 to 1", "two tokens point opposite ways", f"{_ONE_WAY} (1)", equal="1")),
]  # fmt: skip

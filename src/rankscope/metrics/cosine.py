"""Angles between tokens: cos(x_i, x_j) over the pairs i < j of real tokens.

A token of zero length points nowhere: its cosines are 0. One token alone agrees with itself: 1.
No token: NaN. The gaps `1 - cos` are computed as `|u_i - u_j|^2 / 2` of the unit vectors, so that they can be
resolved down to the square of the arithmetic's floor.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankscope.metrics.tokens import TokensLike, Values, nan_where_empty, tokens


def cosines(
    X: TokensLike, padding: Tensor | None = None
) -> tuple[Float[Tensor, "*batch token token"], Bool[Tensor, "*batch token token"]]:
    """All cosines, and which of them are pairs i < j of real tokens."""
    direction, _, real = _directions(X, padding)
    cosine = (direction @ direction.mT).clamp(-1.0, 1.0)
    pairs = (real[..., :, None] & real[..., None, :]).triu(1)
    return cosine, pairs


def _directions(X: TokensLike, padding: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(unit vectors, largest entries, which count); a zero token keeps its zero."""
    ready = tokens(X, padding)
    size = (
        ready.X.abs().amax(-1, keepdim=True)
        if ready.X.shape[-1]
        else ready.X.new_zeros((*ready.X.shape[:-1], 1))
    )
    unit = ready.X / size.masked_fill(size == 0, 1.0)  # squares could leave the range
    length = torch.linalg.vector_norm(unit, dim=-1, keepdim=True)
    return unit / length.masked_fill(length == 0, 1.0), size, ready.real


def mean_cosine(X: TokensLike, padding: Tensor | None = None) -> Values:
    """The mean of cos(x_i, x_j) over pairs.

    >>> mean_cosine(torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]]))
    tensor(0.3333, dtype=torch.float64)
    """
    cosine, pairs = cosines(X, padding)
    return _mean(cosine, pairs, X, padding)


def mean_abs_cosine(X: TokensLike, padding: Tensor | None = None) -> Values:
    """The mean of |cos(x_i, x_j)| over pairs (Wu et al. 2024, figure 4)."""
    cosine, pairs = cosines(X, padding)
    return _mean(cosine.abs(), pairs, X, padding)


def min_cosine(X: TokensLike, padding: Tensor | None = None) -> Values:
    """The smallest cosine of any pair: Cor 1 of Wu et al. 2024 asks that it start above 0."""
    cosine, pairs = cosines(X, padding)
    lowest = cosine.masked_fill(~pairs, 1.0).flatten(-2)
    value = lowest.amin(-1) if lowest.shape[-1] else lowest.new_ones(lowest.shape[:-1])
    return nan_where_empty(value, tokens(X, padding))


def mean_cosine_gap(X: TokensLike, padding: Tensor | None = None) -> Values:
    """`1 - mean cos(x_i, x_j)`: 0 when all tokens point one way."""
    gap, pairs = _gaps(X, padding)
    number = pairs.flatten(-2).sum(-1).clamp(min=1)
    return nan_where_empty(gap.flatten(-2).sum(-1) / number, tokens(X, padding))


def max_cosine_gap(X: TokensLike, padding: Tensor | None = None) -> Values:
    """`1 - min cos(x_i, x_j)`."""
    gap, _ = _gaps(X, padding)
    value = gap.flatten(-2).amax(-1) if gap.shape[-1] else gap.sum((-2, -1))
    return nan_where_empty(value, tokens(X, padding))


def _gaps(
    X: TokensLike, padding: Tensor | None
) -> tuple[Float[Tensor, "*batch token token"], Bool[Tensor, "*batch token token"]]:
    direction, length, real = _directions(X, padding)
    gap = torch.cdist(direction, direction, compute_mode="donot_use_mm_for_euclid_dist").square() / 2
    gap = gap.masked_fill((length == 0) | (length == 0).mT, 1.0)
    pairs = (real[..., :, None] & real[..., None, :]).triu(1)
    return gap.masked_fill(~pairs, 0.0), pairs


def _mean(cosine: Tensor, pairs: Tensor, X: TokensLike, padding: Tensor | None) -> Values:
    number = pairs.flatten(-2).sum(-1)
    total = cosine.masked_fill(~pairs, 0.0).flatten(-2).sum(-1)
    value = (total / number.clamp(min=1)).masked_fill(number == 0, 1.0)
    return nan_where_empty(value, tokens(X, padding))

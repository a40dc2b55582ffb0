"""Angles between tokens: cos(x_i, x_j) over the pairs i < j of real tokens.

A token of zero length points nowhere: its cosines are 0. One token alone agrees with itself: 1.
No token: NaN.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankscope.metrics.tokens import TokensLike, Values, nan_where_empty, tokens


def cosines(
    X: TokensLike, padding: Tensor | None = None
) -> tuple[Float[Tensor, "*batch token token"], Bool[Tensor, "*batch token token"]]:
    """All cosines, and which of them are pairs i < j of real tokens."""
    X, real, _, _ = tokens(X, padding)
    length = torch.linalg.vector_norm(X, dim=-1, keepdim=True)
    direction = X / length.masked_fill(length == 0, 1.0)
    cosine = (direction @ direction.mT).clamp(-1.0, 1.0)
    pairs = (real[..., :, None] & real[..., None, :]).triu(1)
    return cosine, pairs


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
    return nan_where_empty(value, tokens(X, padding).number)


def _mean(cosine: Tensor, pairs: Tensor, X: TokensLike, padding: Tensor | None) -> Values:
    number = pairs.flatten(-2).sum(-1)
    total = cosine.masked_fill(~pairs, 0.0).flatten(-2).sum(-1)
    value = (total / number.clamp(min=1)).masked_fill(number == 0, 1.0)
    return nan_where_empty(value, tokens(X, padding).number)

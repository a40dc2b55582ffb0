"""Singular values of the tokens, and the many meanings of their rank.

With s_1 >= s_2 >= ... the singular values of X and m = min(n, d) their number:

| metric                | definition                                                  |
|-----------------------|-------------------------------------------------------------|
| `numerical_rank`      | how many s_k > max(n, d) eps s_1                             |
| `affine_rank`         | the same of X - 1 mean^T, against the scale of X             |
| `stable_rank`         | `||X||_F^2 / ||X||_2^2 = sum s_k^2 / s_1^2`                  |
| `effective_rank`      | exp of the entropy of s_k / sum s (Roy, Vetterli 2007)       |
| `participation_ratio` | `(sum s_k^2)^2 / sum s_k^4`                                  |
| `sigma_min`           | s_m                                                          |

and of the residual `X - 1 mean^T` alone, whatever its scale: `residual_stable_rank`,
`residual_effective_rank`, and `residual_singular_ratio`, its s_2 / s_1.

Every rank of the zero matrix is 0; without tokens there is none: NaN. `eps` is the unit of the
arithmetic that made X: its dtype's own unless `unit` says otherwise.
"""

from dataclasses import replace

import torch
from torch import Tensor

from rankscope.metrics.centre import centred
from rankscope.metrics.tokens import Tokens, TokensLike, Values, nan_where_empty, ratio, tokens
from rankscope.shapes import Float


def singular_values(X: TokensLike, padding: Tensor | None = None) -> Float[Tensor, "*batch value"]:
    """All min(n, d) singular values, descending; padded tokens only add zeros at the end."""
    ready = tokens(X, padding)
    return torch.linalg.svdvals(ready.X).masked_fill((ready.number == 0)[..., None], torch.nan)


def numerical_rank(X: TokensLike, padding: Tensor | None = None, *, unit: float | None = None) -> Values:
    """The number of singular values above `max(n, d) eps s_1`."""
    ready = tokens(X, padding)
    s = torch.linalg.svdvals(ready.X)
    return nan_where_empty(_count(s, _tolerance(ready, unit or ready.unit), s), ready)


def affine_rank(X: TokensLike, padding: Tensor | None = None, *, unit: float | None = None) -> Values:
    """The dimension of the affine space that the tokens span: the rank of X - 1 mean^T.

    Singular values are counted above `max(n, d) eps s_1(X)`: the centring cannot resolve less.
    """
    ready = tokens(X, padding)
    s, whole = torch.linalg.svdvals(centred(ready)), torch.linalg.svdvals(ready.X)
    return nan_where_empty(_count(s, _tolerance(ready, unit or ready.unit), whole), ready)


def _tolerance(ready: Tokens, unit: float) -> Values:
    """`max(n, d) eps`, n the real tokens."""
    return ready.number.clamp(min=ready.X.shape[-1]) * unit


def _count(s: Tensor, tolerance: Values, scale: Tensor) -> Values:
    if not s.shape[-1]:
        return s.new_zeros(s.shape[:-1])
    return (s > tolerance[..., None] * scale[..., :1]).sum(-1).to(s.dtype)


def stable_rank(X: TokensLike, padding: Tensor | None = None) -> Values:
    """`||X||_F^2 / ||X||_2^2`: at least 1, at most the rank."""
    s, ready = _values(X, padding)
    square = s.square()
    return nan_where_empty(ratio(square.sum(-1), square.amax(-1)), ready)


def effective_rank(X: TokensLike, padding: Tensor | None = None) -> Values:
    """`exp(-sum p_k log p_k)`, `p_k = s_k / sum s` (Roy and Vetterli 2007)."""
    s, ready = _values(X, padding)
    total = s.sum(-1, keepdim=True)
    p = ratio(s, total.expand_as(s))
    rank = torch.special.entr(p).sum(-1).exp().masked_fill(total[..., 0] == 0, 0.0)
    return nan_where_empty(rank, ready)


def participation_ratio(X: TokensLike, padding: Tensor | None = None) -> Values:
    """`(sum s_k^2)^2 / sum s_k^4`: how many directions share the energy."""
    s, ready = _values(X, padding)
    p = s.square()
    return nan_where_empty(ratio(p.sum(-1).square(), p.square().sum(-1)), ready)


def sigma_min(X: TokensLike, padding: Tensor | None = None) -> Values:
    """The smallest of the min(n, d) singular values of the real tokens."""
    ready = tokens(X, padding)
    s = torch.linalg.svdvals(ready.X)
    if not s.shape[-1]:
        return s.new_full(s.shape[:-1], torch.nan)
    last = ready.number.clamp(max=s.shape[-1], min=1) - 1
    return nan_where_empty(s.gather(-1, last[..., None])[..., 0], ready)


def residual_stable_rank(X: TokensLike, padding: Tensor | None = None) -> Values:
    """`||res X||_F^2 / ||res X||_2^2`: in how many directions tokens still differ."""
    return stable_rank(_residual(X, padding))


def residual_effective_rank(X: TokensLike, padding: Tensor | None = None) -> Values:
    """`exp(-sum p_k log p_k)` of the singular values of res X."""
    return effective_rank(_residual(X, padding))


def residual_singular_ratio(X: TokensLike, padding: Tensor | None = None) -> Values:
    """`s_2 / s_1` of res X: 0 when tokens lie on a line."""
    s, ready = _values(_residual(X, padding), None)
    second = s[..., 1] if s.shape[-1] > 1 else s.new_zeros(s.shape[:-1])
    return nan_where_empty(second, ready)


def _residual(X: TokensLike, padding: Tensor | None) -> Tokens:
    ready = tokens(X, padding)
    return replace(ready, X=centred(ready), memo={})


def _values(X: TokensLike, padding: Tensor | None) -> tuple[Tensor, Tokens]:
    """Singular values scaled by the largest (ranks ignore scale, squares must not underflow)."""
    ready = tokens(X, padding)
    s = torch.linalg.svdvals(ready.X)
    if not s.shape[-1]:
        s = s.new_zeros((*s.shape[:-1], 1))
    return ratio(s, s[..., :1].expand_as(s)), ready

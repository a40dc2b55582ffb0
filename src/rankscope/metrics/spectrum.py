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

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rankscope.metrics.base import (
    ROUNDING,
    Meaning,
    Metric,
    Reading,
    Tokens,
    TokensLike,
    Values,
    nan_where_empty,
    ratio,
    tokens,
)
from rankscope.metrics.log_readings import UNIT, ScaledTokens
from rankscope.metrics.residuals import SIZE, centred, relative_mu, token_norm
from rankscope.shapes import Bool, Float

NEAR_TOLERANCE = (1.0, 1 / 3, 1e3)  # Of a rank: its tolerance, and between which multiples of it rounding may decide


def singular_values(X: TokensLike, padding: Tensor | None = None) -> Float[Tensor, "*batch value"]:
    """All min(n, d) singular values, descending; padded tokens only add zeros at the end."""
    ready = tokens(X, padding)
    return torch.linalg.svdvals(ready.X).masked_fill((ready.count == 0)[..., None], torch.nan)


def numerical_rank(X: TokensLike, padding: Tensor | None = None, *, unit: float | None = None) -> Values:
    """The number of singular values above `max(n, d) eps s_1`."""
    ready = tokens(X, padding)
    s = torch.linalg.svdvals(ready.X)
    return nan_where_empty(_count(s, _tolerance(ready, unit or ready.unit), s), ready)


def affine_rank(X: TokensLike, padding: Tensor | None = None, *, unit: float | None = None) -> Values:
    """The dimension of the affine space that the tokens span: the rank of X - 1 mean^T.

    Singular values are counted above `max(n, d) eps s_1(X)`: the centring cannot resolve less. Rows that sum to zero
    have at most n - 1 of them.
    """
    ready = tokens(X, padding)
    s, of_tokens = torch.linalg.svdvals(centred(ready)), torch.linalg.svdvals(ready.X)
    return _affine_count(s, ready, unit or ready.unit, of_tokens)


def affine_rank_with_doubt(
    X: TokensLike, padding: Tensor | None = None, *, unit: float | None = None
) -> tuple[Values, Bool[Tensor, "*batch"]]:
    """`affine_rank`, and True where rounding may have decided it: a singular value lies between a third of the
    tolerance and a thousand times it."""
    ready = tokens(X, padding)
    s, of_tokens = torch.linalg.svdvals(centred(ready)), torch.linalg.svdvals(ready.X)
    unit = unit or ready.unit
    value, low, high = (_affine_count(s, ready, unit * share, of_tokens) for share in NEAR_TOLERANCE)
    return value, low != high


def _affine_count(s: Tensor, ready: Tokens, unit: float, scale: Tensor) -> Values:
    """The rank of a residual with the singular values s, in units of those of `scale`."""
    count = _count(s, _tolerance(ready, unit), scale)
    return nan_where_empty(torch.minimum(count, (ready.count - 1).clamp(min=0)), ready)


def _tolerance(ready: Tokens, unit: float) -> Values:
    """`max(n, d) eps`, n the valid tokens."""
    return ready.count.clamp(min=ready.X.shape[-1]) * unit


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
    """The smallest of the min(n, d) singular values of the valid tokens."""
    ready = tokens(X, padding)
    s = torch.linalg.svdvals(ready.X)
    if not s.shape[-1]:
        return s.new_full(s.shape[:-1], torch.nan)
    last = ready.count.clamp(max=s.shape[-1], min=1) - 1
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
    return replace(ready, given=centred(ready), memo={})


def _values(X: TokensLike, padding: Tensor | None) -> tuple[Tensor, Tokens]:
    """Singular values scaled by the largest (ranks ignore scale, squares must not underflow)."""
    ready = tokens(X, padding)
    s = torch.linalg.svdvals(ready.X)
    if not s.shape[-1]:
        s = s.new_zeros((*s.shape[:-1], 1))
    return ratio(s, s[..., :1].expand_as(s)), ready


def _affine_rank_rule(state: ScaledTokens) -> Reading:
    """A singular value near the tolerance, or up to a thousand times above it, may be rounding: then it is marked."""
    ready = tokens(state.residual.value, state.padding)
    s = torch.linalg.svdvals(ready.X)
    value, low, high = (_affine_count(s, ready, UNIT * share, s) for share in NEAR_TOLERANCE)
    return Reading.of(value, torch.where(low == high, 0.0, value.clamp(min=1.0)))


def _shape_rule(tokens: ScaledTokens, compute: Callable[..., Tensor], bounded: bool = False) -> Reading:
    """The shape of the residual does not depend on its scale, and is as uncertain as rounding: a share of the
    value, or of the largest it could be, one."""
    value = compute(tokens.residual.value, tokens.padding)
    return Reading.of(value, ROUNDING * UNIT * (torch.ones_like(value) if bounded else value))


def _of_residual(
    compute: Callable[..., Tensor], symbol: str, tex: str, meaning: Meaning, bounded: bool = False
) -> Metric:
    """A property of the residual's shape: as uncertain as the residual is, relative to the tokens."""

    def scale(X: TokensLike, padding: Tensor | None = None) -> Tensor:
        return compute(X, padding) / relative_mu(X, padding).clamp(min=1e-300)

    note = f"It says how tokens differ, not by how much.{meaning.note}"
    meaning = meaning._replace(note=note, equal="no fixed number: it is of what they last differed by, however little")
    rule = partial(_shape_rule, compute=compute, bounded=bounded)
    return Metric(compute.__name__, compute, symbol, tex, scale=scale, rule=rule, meaning=meaning)


_RESOLVED = "It counts singular values above what the arithmetic resolves."
_ZERO = "0 where all entries are 0."
_ENERGY = Meaning("1 to min(n, d)", "one direction has all the energy", "many directions share it", _ZERO, equal="1")
_ONE, _MANY = "tokens differ along one direction", "tokens differ in many directions"
_DIRECTIONS = Meaning("1 to min(n - 1, d)", _ONE, _MANY, " 0 where they are the same.")
METRICS = [
    Metric("numerical_rank", numerical_rank, "rank X", r"\mathrm{rank}\,X", count=True,
        meaning=Meaning(
            "0 to min(n, d)", "tokens are multiples of one vector (1)", "tokens are linearly independent",
            _RESOLVED, equal="1")),
    Metric("affine_rank", affine_rank, "rank res X", r"\mathrm{rank\,res}\,X", count=True,
        rule=_affine_rank_rule,
        meaning=Meaning(
            "0 to min(n - 1, d)", "tokens are the same (0)", _MANY, _RESOLVED, equal="0")),
    Metric("stable_rank", stable_rank, "‖X‖_F² / ‖X‖₂²", r"\|X\|_F^2 / \|X\|_2^2", meaning=_ENERGY),
    Metric("effective_rank", effective_rank, "exp H(σ)", r"\exp H(\sigma)",
        meaning=_ENERGY._replace(small="one direction has all the weight")),
    Metric("participation_ratio", participation_ratio, "(Σσ²)² / Σσ⁴", r"(\sum\sigma^2)^2 / \sum\sigma^4",
        meaning=_ENERGY),
    Metric("sigma_min", sigma_min, "σ_min(X)", r"\sigma_{\min}(X)", degree=1,
        scale=partial(token_norm, norm="spectral"),
        meaning=Meaning(
            "0 and above", "tokens nearly miss a direction", "tokens fill all directions", SIZE, equal="0")),
    _of_residual(residual_stable_rank, "‖res X‖_F² / ‖res X‖₂²",
        r"\|\mathrm{res}\,X\|_F^2 / \|\mathrm{res}\,X\|_2^2", _DIRECTIONS),
    _of_residual(residual_effective_rank, "exp H(σ(res X))", r"\exp H(\sigma(\mathrm{res}\,X))", _DIRECTIONS),
    _of_residual(residual_singular_ratio, "σ₂ / σ₁ of res X", r"\sigma_2 / \sigma_1\,(\mathrm{res}\,X)",
        Meaning("0 to 1", "tokens lie on a line", "tokens differ in two directions alike"), bounded=True),
]  # fmt: skip

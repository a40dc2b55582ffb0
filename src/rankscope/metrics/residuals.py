"""How far the tokens are from being the same.

`res(X) = X - 1 x^T`, measured in four norms, absolute and relative to the same norm of X:

| metric            | norm of res(X)                                                    | source            |
|-------------------|-------------------------------------------------------------------|-------------------|
| `residual`        | `||A||_{1,inf} = sqrt(||A||_1 ||A||_inf)`                         | Dong et al. 2021  |
| `mu`              | Frobenius, `||X - 11^T X/n||_F`                                   | Wu et al. 2024    |
| `spectral_residual` | the largest singular value                                      |                   |
| `max_residual`    | the largest entry                                                 |                   |

One token: 0. The zero matrix: 0, also relative. No token: NaN.
"""

import torch
from torch import Tensor

from rankscope.metrics.centre import Centre, Norm, centred
from rankscope.metrics.tokens import (
    Tokens,
    TokensLike,
    Values,
    nan_where_empty,
    norm_in_range,
    ratio,
    tokens,
)
from rankscope.shapes import Float

Matrix = Float[Tensor, "*batch token width"]


def composite_norm(A: Matrix) -> Values:
    """`||A||_{1,inf} = sqrt(||A||_1 ||A||_inf)`, largest column sum times largest row sum of |A|.

    Submultiplicative, but not a norm: with A the 5 x 5 matrix of ones in its first column,
    c(A) = c(A^T) = sqrt 5 and c(A + A^T) = 6 > 2 sqrt 5.
    """
    if A.is_cuda:  # sums of |A| without a place for it; four times as slow elsewhere
        columns, rows = (torch.linalg.vector_norm(A, ord=1, dim=dim) for dim in (-2, -1))
    else:
        size = A.abs()
        columns, rows = size.sum(-2), size.sum(-1)
    return _largest(columns).sqrt() * _largest(rows).sqrt()  # the product could leave the range


def frobenius_norm(A: Matrix) -> Values:
    """`||A||_F`, the root of the sum of squares."""
    norm = torch.linalg.vector_norm(A, dim=(-2, -1))
    if bool(((norm > 1e-140) & (norm < 1e140)).all()):
        return norm
    size = max_norm(A)  # squares could leave the range
    unit = A / size.masked_fill(size == 0, 1.0)[..., None, None]
    return size * torch.linalg.vector_norm(unit, dim=(-2, -1))


def spectral_norm(A: Matrix) -> Values:
    """`||A||_2`, the largest singular value."""
    return _largest(torch.linalg.svdvals(A))


def max_norm(A: Matrix) -> Values:
    """`max_ij |A_ij|`."""
    return _largest(A.abs().flatten(-2))


def _largest(x: Float[Tensor, "*batch n"]) -> Values:
    return x.amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])


NORMS = {
    "composite": composite_norm,
    "frobenius": frobenius_norm,
    "spectral": spectral_norm,
    "max": max_norm,
}


def token_norm(X: TokensLike, padding: Tensor | None = None, *, norm: Norm) -> Values:
    """The norm of X itself: the scale against which the relative forms are taken."""
    ready = tokens(X, padding)
    if norm == "frobenius" and _narrow(ready):
        return nan_where_empty(norm_in_range(ready), ready)
    size = ready.once(f"{norm} norm", lambda: NORMS[norm](ready.X))
    return nan_where_empty(size, ready)


def _narrow(ready: Tokens) -> bool:
    """Whether X came in a dtype of smaller range than float64: its squares stay in range."""
    return ready.unit > torch.finfo(torch.float64).eps


def _residual(X: TokensLike, padding: Tensor | None, centre: Centre, norm: Norm) -> Values:
    ready = tokens(X, padding)
    what = f"{norm} norm of the residual about the {centre}"
    size = ready.once(what, lambda: _of_deviation(ready, centred(ready, centre, norm), norm))
    return nan_where_empty(size, ready)


def _of_deviation(ready: Tokens, R: Matrix, norm: Norm) -> Values:
    if norm == "frobenius" and _narrow(ready):
        return torch.linalg.vector_norm(R, dim=(-2, -1))
    return NORMS[norm](R)


def _relative(X: TokensLike, padding: Tensor | None, centre: Centre, norm: Norm) -> Values:
    return ratio(_residual(X, padding, centre, norm), token_norm(X, padding, norm=norm))


def residual(X: TokensLike, padding: Tensor | None = None, *, centre: Centre = "mean") -> Values:
    """`||res X||_{1,inf}` (Dong et al. 2021, section 2).

    >>> residual(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    tensor(1., dtype=torch.float64)
    """
    return _residual(X, padding, centre, "composite")


def relative_residual(X: TokensLike, padding: Tensor | None = None, *, centre: Centre = "mean") -> Values:
    """`||res X||_{1,inf} / ||X||_{1,inf}` (Dong et al. 2021, figure 2)."""
    return _relative(X, padding, centre, "composite")


def mu(X: TokensLike, padding: Tensor | None = None, *, centre: Centre = "mean") -> Values:
    """`mu(X) = ||X - 1 1^T X / n||_F` (Wu et al. 2024, section 3)."""
    return _residual(X, padding, centre, "frobenius")


def relative_mu(X: TokensLike, padding: Tensor | None = None, *, centre: Centre = "mean") -> Values:
    """`mu(X) / ||X||_F`: what is left of mu when the network merely shrinks its tokens."""
    return _relative(X, padding, centre, "frobenius")


def spectral_residual(X: TokensLike, padding: Tensor | None = None, *, centre: Centre = "mean") -> Values:
    """`||res X||_2`."""
    return _residual(X, padding, centre, "spectral")


def relative_spectral_residual(
    X: TokensLike, padding: Tensor | None = None, *, centre: Centre = "mean"
) -> Values:
    """`||res X||_2 / ||X||_2`."""
    return _relative(X, padding, centre, "spectral")


def max_residual(X: TokensLike, padding: Tensor | None = None, *, centre: Centre = "mean") -> Values:
    """`max_ij |res(X)_ij|`."""
    return _residual(X, padding, centre, "max")


def relative_max_residual(X: TokensLike, padding: Tensor | None = None, *, centre: Centre = "mean") -> Values:
    """`max_ij |res(X)_ij| / max_ij |X_ij|`."""
    return _relative(X, padding, centre, "max")


def high_frequency_share(X: TokensLike, padding: Tensor | None = None) -> Values:
    """`||HC X||_F^2 / ||X||_F^2`, HC = I - 11^T/n: the share of the energy outside frequency zero
    of the Fourier transform along the tokens (Wang et al. 2022, section 2); equals `relative_mu^2`."""
    return relative_mu(X, padding).square()

"""How far the tokens are from being the same.

`res(X) = X - 1 x^T`, measured in four norms, absolute and relative to the same norm of X:

| metric            | norm of res(X)                                                    | source            |
|-------------------|-------------------------------------------------------------------|-------------------|
| `residual`        | `||A||_{1,inf} = sqrt(||A||_1 ||A||_inf)`                         | Dong et al. 2021  |
| `mu`              | Frobenius, `||X - 11^T X/n||_F`                                   | Wu et al. 2024    |
| `spectral_residual` | the largest singular value                                      |                   |
| `max_residual`    | the largest entry                                                 |                   |

One token: 0. The zero matrix: 0, also relative. No token: NaN. In deviation arithmetic all are read off the
residual and its log-scale, at any scale; `METRICS` at the end says everything else about each.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rankscope.metrics.base import Meaning, Metric, Reading
from rankscope.metrics.batch import Tokens, TokensLike, Values, nan_where_empty, norm_in_range, ratio, tokens
from rankscope.metrics.centre import Centre, Norm, centred, closed_form
from rankscope.metrics.log_readings import LOWEST, LogScales, ScaledTokens, log_of, reading_of_tokens
from rankscope.metrics.norms import ORDER, composite_norm, frobenius_norm, max_norm, on_gpu, token_norms
from rankscope.shapes import Float

Matrix = Float[Tensor, "*batch token width"]


def spectral_norm(A: Matrix) -> Values:
    """`||A||_2`, the largest singular value."""
    s = torch.linalg.svdvals(A)
    return s.amax(-1) if s.shape[-1] else s.new_zeros(s.shape[:-1])


NORMS = {"composite": composite_norm, "frobenius": frobenius_norm, "spectral": spectral_norm, "max": max_norm}


def token_norm(X: TokensLike, padding: Tensor | None = None, *, norm: Norm) -> Values:
    """The norm of X itself: the scale against which the relative forms are taken."""
    ready = tokens(X, padding)
    if norm == "frobenius" and _narrow(ready) and not ready.fused:
        return nan_where_empty(norm_in_range(ready), ready)
    return nan_where_empty(ready.once(f"{norm} norm", lambda: _norm(ready, norm, lambda: ready.X, False)), ready)


def _residual(X: TokensLike, padding: Tensor | None, centre: Centre, norm: Norm) -> Values:
    ready, about_mean = tokens(X, padding), closed_form(centre, norm) == "mean"
    what = f"{norm} norm of the residual about the {centre}"

    def compute() -> Values:
        R = partial(centred, ready, centre, norm)
        return _norm(ready, norm, R, True) if about_mean else NORMS[norm](R())

    return nan_where_empty(ready.once(what, compute), ready)


def _norm(ready: Tokens, norm: Norm, matrix: Callable[[], Matrix], residual: bool) -> Values:
    """The norm of X or of its residual about the mean, `matrix()`: with the others, if these are taken in one go."""
    if ready.fused and norm in ORDER:
        return ready.norm(norm, residual)
    if norm == "frobenius" and _narrow(ready):
        return torch.linalg.vector_norm(matrix(), dim=(-2, -1))
    return NORMS[norm](matrix())


def _narrow(ready: Tokens) -> bool:
    """Whether X came in a dtype of smaller range than float64: its squares stay in range."""
    return ready.unit > torch.finfo(torch.float64).eps


def _relative(X: TokensLike, padding: Tensor | None, centre: Centre, norm: Norm) -> Values:
    ready = tokens(X, padding)
    return ratio(_residual(ready, None, centre, norm), token_norm(ready, norm=norm))


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
    """`||res X||_2`, the largest singular value of the residual."""
    return _residual(X, padding, centre, "spectral")


def relative_spectral_residual(X: TokensLike, padding: Tensor | None = None, *, centre: Centre = "mean") -> Values:
    """`||res X||_2 / ||X||_2`, the largest singular value of the residual as a share of that of X."""
    return _relative(X, padding, centre, "spectral")


def max_residual(X: TokensLike, padding: Tensor | None = None, *, centre: Centre = "mean") -> Values:
    """`max_ij |res(X)_ij|`, the largest entry of the residual."""
    return _residual(X, padding, centre, "max")


def relative_max_residual(X: TokensLike, padding: Tensor | None = None, *, centre: Centre = "mean") -> Values:
    """`max_ij |res(X)_ij| / max_ij |X_ij|`, the largest entry of the residual as a share of that of X."""
    return _relative(X, padding, centre, "max")


def high_frequency_share(X: TokensLike, padding: Tensor | None = None) -> Values:
    """`||HC X||_F^2 / ||X||_F^2`, HC = I - 11^T/n: the share of the energy outside frequency zero
    of the Fourier transform along the tokens (Wang et al. 2022, section 2)."""
    return relative_mu(X, padding).square()


def log_residual(scaled: ScaledTokens, norm: Norm, centre: Centre = "mean", relative: bool = False) -> LogScales:
    """The log of a norm of the residual in deviation arithmetic, or of its share of the tokens' norm."""
    R = scaled.residual
    if centre != "mean":
        size = NORMS[norm](centred(tokens(R.value, scaled.padding), centre, norm))
    else:
        size = _norm_once(scaled, norm, "", R.value)
    log = log_of(size, R.log)
    if not relative:
        return log
    # The scales are subtracted first: beside a log of 1e13 a share would be rounded in its third digit.
    of_tokens = log_of(_norm_once(scaled, norm, " of tokens", scaled.tokens), torch.zeros_like(log))
    return torch.where(log <= LOWEST, log, log_of(size, R.log - scaled.log) - of_tokens)


def _norm_once(scaled: ScaledTokens, norm: Norm, of: str, A: Matrix) -> LogScales:
    """The norm of a matrix, taken at the first call; on a GPU with the others that one kernel takes."""
    if norm + of not in scaled.norms:
        together = norm in ORDER and on_gpu(A)
        norms = dict(zip(ORDER, token_norms(A)[:, 0], strict=True)) if together else {norm: NORMS[norm](A)}
        scaled.norms.update({name + of: size for name, size in norms.items()})
    return scaled.norms[norm + of]


def _rule(tokens: ScaledTokens, norm: Norm, relative: bool, centre: Centre = "mean", power: int = 1) -> Reading:
    return reading_of_tokens(power * log_residual(tokens, norm, centre, relative), tokens)


SAME, DIFFER = "tokens are nearly the same", "tokens differ"
SIZE = "In the tokens' own units: it grows when a network makes its tokens larger, though none moves apart."
ABOVE_ONE = (
    "It can be above 1. Taking the mean away can make columns of a matrix larger: of four tokens, one 1 and "
    "three 0, the mean is 1/4; less the mean the column sums to |3/4| + 3 |1/4| = 3/2, where it was 1. It "
    "is 2 (1 - 1/n) at most; at 1, tokens differ from their mean by as much as they are large."
)
VERDICT = (
    "The verdict in a terminal and a report is in this metric, as a geometric mean over all excerpts. The "
    "cloud of a report says relative_mu of the one excerpt that it draws: another norm, and one excerpt "
    "instead of all, so the two numbers are alike and not equal."
)
CLOUD = "A report's cloud gives this for the one excerpt that it draws; its verdict gives relative_residual."


def _of_norm(
    compute: Callable[..., Tensor], norm: Norm, symbol: str, tex: str, relative: bool, meaning: Meaning, **more: Any
) -> Metric:
    """A norm of the residual, or its share of the same norm of the tokens."""
    rule = partial(_rule, norm=norm, relative=relative)
    more |= {"direction": 1, "share": relative, "rule": rule, "centres": True}
    return Metric(compute.__name__, compute, symbol, tex, meaning=meaning, **more)


def _absolute(compute: Callable[..., Tensor], norm: Norm, symbol: str, tex: str, large: str) -> Metric:
    meaning, scale = Meaning("0 and above", SAME, large, SIZE, equal="0"), partial(token_norm, norm=norm)
    return _of_norm(compute, norm, symbol, tex, False, meaning, degree=1, scale=scale)


def _share(compute: Callable[..., Tensor], norm: Norm, symbol: str, tex: str, **words: Any) -> Metric:
    of_tokens, of_tokens_tex = symbol.replace("res X", "X"), tex.replace(r"\mathrm{res}\,X", "X")
    meaning = Meaning(small=SAME, equal="0", **words)
    return _of_norm(compute, norm, f"{symbol} / {of_tokens}", f"{tex} / {of_tokens_tex}", True, meaning)


_Norm = tuple[Norm, str, str]  # a norm, and how a terminal and a figure write that of the residual
_COMPOSITE: _Norm = ("composite", "‖res X‖₁,∞", r"\|\mathrm{res}\,X\|_{1,\infty}")
_FROBENIUS: _Norm = ("frobenius", "‖res X‖_F", r"\|\mathrm{res}\,X\|_F")
_SPECTRAL: _Norm = ("spectral", "‖res X‖₂", r"\|\mathrm{res}\,X\|_2")
_MAX: _Norm = ("max", "max |res X|", r"\max\,|\mathrm{res}\,X|")
METRICS = [
    _absolute(residual, *_COMPOSITE, large=DIFFER),
    _share(relative_residual, *_COMPOSITE, range="0 to 2", large=DIFFER, note=f"{ABOVE_ONE} {VERDICT}"),
    _absolute(mu, *_FROBENIUS, large=DIFFER),
    _share(relative_mu, *_FROBENIUS, range="0 to 1", large="the mean token is zero (1)", note=CLOUD),
    _absolute(spectral_residual, *_SPECTRAL, large="tokens differ along one direction at least"),
    _share(relative_spectral_residual, *_SPECTRAL, range="0 to 1",
        large="tokens differ most along the direction in which they are largest"),
    _absolute(max_residual, *_MAX, large="some token differs in some coordinate"),
    _share(relative_max_residual, *_MAX, range="0 to 2", large="the largest coordinate belongs to few tokens",
        note="It can be above 1: a token on the other side of the mean from the others is further from it "
        "than from zero."),
    Metric("high_frequency_share", high_frequency_share, "‖HC X‖² / ‖X‖²", r"\|HC\,X\|_F^2 / \|X\|_F^2",
        power=2, direction=1, share=True, rule=partial(_rule, norm="frobenius", relative=True, power=2),
        meaning=Meaning("0 to 1", SAME, "the mean token is zero (1)", "The square of relative_mu.", equal="0")),
]  # fmt: skip
_FROM_NORMS = [known for known in METRICS if known.compute in (residual, relative_residual, mu, relative_mu)]


def from_norms(metric: Metric) -> bool:
    """True if a metric asks for nothing but the Frobenius and composite norms of X and of its residual about the mean,
    which `watch` takes of many layers together. A copy that computes its value or its floor otherwise asks for more."""
    return any(metric.compute is known.compute and metric.scale is known.scale for known in _FROM_NORMS)

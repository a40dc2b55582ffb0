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

**The centre**, the common token x that is subtracted:

| centre     | x                                                   | minimises                    |
|------------|-----------------------------------------------------|------------------------------|
| `mean`     | the mean token (the published code's choice)        | Frobenius and spectral norm  |
| `midrange` | half of (largest + smallest), entry by entry        | the largest entry            |
| `argmin`   | the minimiser of the norm at hand (the definition)  | that norm                    |

The last is the paper's own: of the composite norm, the x that minimises `||X - 1 x^T||_{1,inf}` (Dong et al. 2021,
section 2). `||A||_{1,inf} = sqrt(f g)`, f the largest column sum and g the largest row sum of |A|, is a geometric mean
of two convex functions of x, itself not convex. What is convex is the set of pairs (f, g) that can be had or exceeded.
Every linear programme

    minimise  a f + b g   over x,  with s_ij >= |X_ij - x_j|,  f >= sum_i s_ij,  g >= sum_j s_ij

(a = t, b = 1/t in `min_t (t f + g/t) / 2 = sqrt(f g)`) gives one supporting line of that set and one point on it. The
lines enclose the set from below in a polygon, and `f g` is quasi-concave, so its minimum over the polygon lies at a
vertex: a lower bound. Points give upper bounds. The loop cuts off the best vertex, by the programme whose weights are
normal to the chord beneath which it lies, until the two bounds meet: a global minimum, proved to `TOLERANCE`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from rankscope.errors import ConvergenceError, MetricError, require_one_of
from rankscope.metrics.base import (
    Centre,
    Meaning,
    Metric,
    Reading,
    Tokens,
    TokensLike,
    Values,
    nan_where_empty,
    norm_in_range,
    ratio,
    tokens,
)
from rankscope.metrics.log_readings import LOWEST, LogScales, ScaledTokens, log_of, reading_of_tokens
from rankscope.metrics.norms import ORDER, composite_norm, frobenius_norm, max_norm, on_gpu, token_norms
from rankscope.shapes import Float

TOLERANCE = 1e-5  # Relative gap between the value returned and the proved lower bound: what HiGHS, at 1e-7, can promise
PROGRAMMES = 100  # Linear programmes per sample before giving up; a dozen is usual

Norm = Literal["composite", "frobenius", "spectral", "max"]

MINIMISER: dict[Norm, Centre] = {"frobenius": "mean", "spectral": "mean", "max": "midrange"}
"""Closed forms of the argmin. Spectral: `||X - 1x^T||_2 >= ||(I - 11^T/n)(X - 1x^T)||_2`, whose right
side does not depend on x and is attained at the mean."""

TokenArray = Float[np.ndarray, "token width"]
Vector = Float[np.ndarray, " width"]


def closed_form(centre: Centre, norm: Norm) -> Centre:
    """The centre that is the argmin of a norm where that has a closed form, and the centre itself elsewhere."""
    require_one_of("centre", centre, get_args(Centre), MetricError)
    return MINIMISER.get(norm, centre) if centre == "argmin" else centre


def centred(tokens: Tokens, centre: Centre = "mean", norm: Norm = "composite") -> Float[Tensor, "*batch token width"]:
    """res(X) about the chosen centre; padded rows are zero."""
    chosen = closed_form(centre, norm)

    def compute() -> Tensor:
        x = centre_of(tokens, chosen)[..., None, :]
        if tokens.unpadded:
            return tokens.X - x
        # X is zero at padded tokens: in one pass over it, x is taken off the valid ones, 0 off the others.
        return torch.addcmul(tokens.X, tokens.valid[..., None].to(tokens.X.dtype), x, value=-1)

    return tokens.once("about the mean", compute) if chosen == "mean" else compute()


def centre_of(tokens: Tokens, centre: Centre) -> Float[Tensor, "*batch width"]:
    """The common token x; zero for a sample without tokens."""
    X, valid, count = tokens.X, tokens.valid, tokens.count
    if centre == "mean":
        return X.sum(-2) / count.clamp(min=1)[..., None]
    if centre == "midrange" and X.shape[-2]:
        padded = ~valid[..., None]
        top = X.masked_fill(padded, -torch.inf).amax(-2)
        bottom = X.masked_fill(padded, torch.inf).amin(-2)
        return ((top + bottom) / 2).masked_fill((count == 0)[..., None], 0.0)
    if not X.shape[-2]:
        return X.new_zeros((*X.shape[:-2], X.shape[-1]))
    return composite_argmin(tokens)


def composite_argmin(tokens: Tokens) -> Float[Tensor, "*batch width"]:
    """The minimiser x of `||X - 1 x^T||_{1,inf}` of every sample.

    Costs about ten linear programmes in `token * width` variables per sample: fine up to some ten
    thousand entries, minutes beyond.
    """
    X = tokens.X.detach().flatten(0, -3) if tokens.X.ndim > 2 else tokens.X.detach()[None]
    valid = tokens.valid.flatten(0, -2) if tokens.valid.ndim > 1 else tokens.valid[None]
    rows = [minimiser(sample[kept].cpu().numpy()) for sample, kept in zip(X, valid, strict=True)]
    width = X.shape[-1]
    x = torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, width, dtype=torch.float64)
    return x.to(X.device).reshape(*tokens.X.shape[:-2], width)


def minimiser(X: TokenArray) -> Vector:
    """The minimiser for one matrix; zero where there is no token."""
    if X.size == 0:
        return np.zeros(X.shape[-1])
    shift = X.mean(0)
    size = float(np.abs(X - shift).max())
    if size == 0.0:
        return shift
    best = shift + size * _search((X - shift) / size)
    # Compared where they will be used, since shifting and scaling round.
    return min((best, shift, (X.max(0) + X.min(0)) / 2), key=lambda x: math.prod(_sums(X, x)))


@dataclass(frozen=True)
class _Tangent:
    """The supporting line `a f + b g = level`, touching the set of attainable (f, g) at `point`."""

    a: float
    b: float
    point: tuple[float, float]

    @property
    def level(self) -> float:
        return self.a * self.point[0] + self.b * self.point[1]


def _search(X: TokenArray) -> Vector:
    best = min((X.mean(0), (X.max(0) + X.min(0)) / 2, np.median(X, axis=0)), key=lambda x: math.prod(_sums(X, x)))
    programme = _Programme(X)
    tangents: list[_Tangent] = []
    # Nearly pure weights: the two ends of the trade between column sums and row sums.
    weights = [(1.0, 1e-9), (1e-9, 1.0)]
    for _ in range(PROGRAMMES):
        for a, b in weights:
            x, point = programme.solve(a, b)
            tangents.append(_Tangent(a, b, point))
            best = min(best, x, key=lambda x: math.prod(_sums(X, x)))
        tangents.sort(key=lambda line: line.b / line.a)
        vertices = ((math.prod(_meet(p, q)), p, q) for p, q in pairwise(tangents))
        product, left, right = min(vertices, key=lambda vertex: vertex[0])
        # `product` is f g, the square of the measure.
        if math.prod(_sums(X, best)) <= product * (1 + TOLERANCE) ** 2:
            return best
        if left.point == right.point:
            return best  # the vertex is attainable, but for the solver's rounding
        a, b = abs(left.point[1] - right.point[1]), abs(right.point[0] - left.point[0])
        weights = [(a / (a + b), b / (a + b))]  # by which the two points are worth the same
    gap = np.sqrt(math.prod(_sums(X, best)) / product) - 1
    sentence = f"the argmin centre must be proved to {TOLERANCE:g}; {PROGRAMMES} programmes left a gap of {gap:.1e}"
    raise ConvergenceError(f"{sentence}: use centre='mean', at most 2(1 - 1/n) above it", subject="centre")


def _sums(X: TokenArray, x: Vector) -> tuple[float, float]:
    """(largest column sum, largest row sum) of |X - 1 x^T|."""
    A = np.abs(X - x)
    return float(A.sum(0).max()), float(A.sum(1).max())


def _meet(p: _Tangent, q: _Tangent) -> tuple[float, float]:
    """Where two supporting lines cross."""
    det = p.a * q.b - q.a * p.b
    if abs(det) < 1e-15:
        return p.point
    return (p.level * q.b - q.level * p.b) / det, (p.a * q.level - q.a * p.level) / det


class _Programme:
    """`minimise a f + b g` over x, s, f, g; only the weights change between calls."""

    def __init__(self, X: TokenArray) -> None:
        from scipy.sparse import csr_array, eye_array, hstack, kron, vstack

        n, d = X.shape
        entries = eye_array(n * d)
        to_x = kron(np.ones((n, 1)), eye_array(d))  # entry (i, j) -> x_j
        no_x, none = csr_array((n + d, d)), csr_array((n * d, 2))
        columns = kron(np.ones((1, n)), eye_array(d))  # sum over tokens, per column
        rows = kron(eye_array(n), np.ones((1, d)))  # sum over the width, per token
        is_f = np.r_[np.ones(d), np.zeros(n)][:, None]
        above = hstack([to_x, -entries, none])  # x_j - s_ij <= X_ij
        below = hstack([-to_x, -entries, none])  # -x_j - s_ij <= -X_ij
        sums = hstack([no_x, vstack([columns, rows]), csr_array(-np.c_[is_f, 1 - is_f])])
        self.A = vstack([above, below, sums]).tocsr()
        self.b = np.r_[X.ravel(), -X.ravel(), np.zeros(n + d)]
        self.bounds = [(None, None)] * d + [(0, None)] * (n * d + 2)
        self.X = X

    def solve(self, a: float, b: float) -> tuple[Vector, tuple[float, float]]:
        """The minimising x, and the optimal (f, g)."""
        from scipy.optimize import linprog

        n, d = self.X.shape
        cost = np.r_[np.zeros(d + n * d), a, b]
        result = linprog(cost, A_ub=self.A, b_ub=self.b, bounds=self.bounds, method="highs")
        if result.status != 0:
            sentence = f"the linear programme of the argmin centre must be solved; HiGHS says {result.message!r}"
            raise ConvergenceError(f"{sentence}: use centre='mean', at most 2(1 - 1/n) above it", subject="centre")
        return np.asarray(result.x[:d]), (float(result.x[-2]), float(result.x[-1]))


Matrix = Float[Tensor, "*batch token width"]


def spectral_norm(A: Matrix) -> Values:
    """`||A||_2`, the largest singular value."""
    s = torch.linalg.svdvals(A)
    return s.amax(-1) if s.shape[-1] else s.new_zeros(s.shape[:-1])


NORMS = {"composite": composite_norm, "frobenius": frobenius_norm, "spectral": spectral_norm, "max": max_norm}


def token_norm(X: TokensLike, padding: Tensor | None = None, *, norm: Norm) -> Values:
    """The norm of X itself: the scale against which the relative forms are taken."""
    return _norm(tokens(X, padding), norm, None)


def _residual(X: TokensLike, padding: Tensor | None, centre: Centre, norm: Norm) -> Values:
    return _norm(tokens(X, padding), norm, closed_form(centre, norm))


def _norm(ready: Tokens, norm: Norm, centre: Centre | None) -> Values:
    """The norm of X, or of its residual about a centre, taken once; with the others, if these are taken in one go."""

    def compute() -> Values:
        residual, narrow = centre is not None, ready.unit > torch.finfo(torch.float64).eps
        if ready.fused and norm in ORDER and centre in (None, "mean"):
            return ready.norm(norm, residual)
        # Squares of numbers that were given in a dtype of smaller range than float64 stay in range.
        if norm == "frobenius" and narrow and not residual:
            return norm_in_range(ready)
        A = centred(ready, centre, norm) if centre is not None else ready.X
        if norm == "frobenius" and narrow and centre == "mean":
            return torch.linalg.vector_norm(A, dim=(-2, -1))
        return NORMS[norm](A)

    return nan_where_empty(ready.once(NORM_TAKEN.format(norm=norm, centre=centre), compute), ready)


NORM_TAKEN = "{norm} norm about {centre}"
"""The name in `Tokens.memo` of a norm of the residual about a centre, and of X itself where the centre is None."""


def memo_of_norms(sizes: Mapping[Norm, tuple[Values, Values]]) -> dict[str, Values]:
    """What `Tokens.memo` holds when norms are known: metrics of which `from_norms` is true then look at no entry.

    Args:
        sizes: By the name of a norm: the norm of X, and that of the residual of X about the mean token.
    """
    return {"vector norm": sizes["frobenius"][0]} | {
        NORM_TAKEN.format(norm=norm, centre=centre): size
        for norm, both in sizes.items()
        for centre, size in zip((None, "mean"), both, strict=True)
    }


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

"""The common token x that is subtracted: `res(X) = X - 1 x^T`.

| centre     | x                                                   | minimises                    |
|------------|-----------------------------------------------------|------------------------------|
| `mean`     | the mean token (the published code's choice)        | Frobenius and spectral norm  |
| `midrange` | half of (largest + smallest), entry by entry        | the largest entry            |
| `argmin`   | the minimiser of the norm at hand (the definition)  | that norm                    |

The last is the paper's own: of the composite norm, the x that minimises `||X - 1 x^T||_{1,inf}` (Dong et al. 2021,
section 2).

`||A||_{1,inf} = sqrt(f g)` with f the largest column sum and g the largest row sum of |A|: a geometric
mean of two convex functions of x, itself not convex. What is convex is the set of pairs (f, g) that can
be had or exceeded. Every linear programme

    minimise  a f + b g   over x,  with s_ij >= |X_ij - x_j|,  f >= sum_i s_ij,  g >= sum_j s_ij

(a = t, b = 1/t in `min_t (t f + g/t) / 2 = sqrt(f g)`) gives one supporting line of that set and one point on it. The
lines enclose the set from below in a polygon, and `f g` is quasi-concave, so its minimum over the polygon lies at a
vertex: a lower bound. Points give upper bounds. The loop cuts off the best vertex, by the programme whose weights are
normal to the chord beneath which it lies, until the two bounds meet: a global minimum, proved to `TOLERANCE`.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from rankscope.errors import ConvergenceError, MetricError, require_one_of
from rankscope.metrics.batch import Tokens
from rankscope.shapes import Float

TOLERANCE = 1e-5  # Relative gap between the value returned and the proved lower bound: what HiGHS, at 1e-7, can promise
PROGRAMMES = 100  # Linear programmes per sample before giving up; a dozen is usual

Centre = Literal["mean", "midrange", "argmin"]
Norm = Literal["composite", "frobenius", "spectral", "max"]

MINIMISER: dict[Norm, Centre] = {"frobenius": "mean", "spectral": "mean", "max": "midrange"}
"""Closed forms of the argmin. Spectral: `||X - 1x^T||_2 >= ||(I - 11^T/n)(X - 1x^T)||_2`, whose right
side does not depend on x and is attained at the mean."""

Matrix = Float[np.ndarray, "token width"]
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
        hidden = ~valid[..., None]
        top = X.masked_fill(hidden, -torch.inf).amax(-2)
        bottom = X.masked_fill(hidden, torch.inf).amin(-2)
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


def minimiser(X: Matrix) -> Vector:
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


def _search(X: Matrix) -> Vector:
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


def _sums(X: Matrix, x: Vector) -> tuple[float, float]:
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

    def __init__(self, X: Matrix) -> None:
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

"""Attention under masks that let tokens see different tokens, and the graphs of masks, in plain numpy.

Rows of attention sum to one, so with `X = 1 x^T + R` a layer is `P X W = 1 (x W)^T + P R W`: nothing is subtracted, and
differences of any size are followed with the scale of R apart.
"""

import math

import numpy as np

from study_tests.rederived.plain import Array, Heads, Mask, left, softmax


def fall(layers: list[Heads], X: Array, seen: Mask, norm: bool, gain: float = 1.0) -> list[float]:
    """log10 of what is left after each layer of attention alone; with `norm` a LayerNorm comes before each layer.

    `gain` multiplies the scores.
    """
    x, R, s, t = X.mean(0), X - X.mean(0), 0.0, 0.0  # tokens are e^t (1 x^T + e^s R)
    logs = [math.log10(left(X))]
    for layer in layers:
        if norm:
            x, R, s, t = *normed_apart(x, R, s), 0.0
        size = math.exp(s)
        Y = (x + size * R) * math.exp(t)
        # What is constant along a row of scores drops out: keys may be those of R alone.
        scores = gain * layer.scores(Y, R * math.exp(t)) * size
        P = softmax(np.where(seen, scores, -np.inf))
        x, R = layer.out(np.ones((layer.heads, 1, 1)), x[None])[0], layer.out(P, R)
        middle = R.mean(0)
        x, R = x + size * middle, R - middle
        whole, rest = float(np.linalg.norm(x)), float(np.linalg.norm(R))
        x, t = x / whole, t + math.log(whole)
        R, s = R / rest, s + math.log(rest / whole)
        together = math.sqrt(len(X) + math.exp(2 * s))
        logs.append((s - math.log(together)) / math.log(10))
    return logs


def normed_apart(x: Array, R: Array, s: float) -> tuple[Array, Array, float]:
    """LayerNorm of `x + e^s R_i`, again as what tokens share and what they differ by.

    With c the centred x, C the centred R and |.| the root mean square: `(c + e^s C_i) / l_i - c / l = e^s (C_i / l_i -
    c g_i / (l l_i (l + l_i)))`, where `g_i = (l_i^2 - l^2) / e^s = 2 <c, C_i> + e^s |C_i|^2`.
    """
    size = math.exp(s)
    c, C = x - x.mean(), R - R.mean(-1, keepdims=True)
    length = math.sqrt(np.square(c).mean())
    lengths = np.sqrt(np.square(c + size * C).mean(-1, keepdims=True))
    more = (2 * C @ c + size * np.square(C).sum(-1))[:, None] / len(c)
    D = C / lengths - c * more / (length * lengths * (length + lengths))
    common, middle = c / length, D.mean(0)
    D = D - middle
    rest = float(np.linalg.norm(D))
    return common + size * middle, D / rest, s + math.log(rest)


def averaging(seen: Mask) -> Array:
    """Even attention: rows of the mask divided by their sums."""
    return seen / seen.sum(1, keepdims=True)


def even(seen: Mask, layers: int) -> float:
    """log10 of `||C A^L|| / ||C||`, C = I - 11^T / n: what even attention leaves after L layers."""
    A, n = averaging(seen.astype(float)), len(seen)
    C = np.eye(n) - 1 / n
    rest, log = C, 0.0
    for _ in range(layers):
        rest = C @ (A @ rest)
        size = float(np.linalg.norm(rest))
        if size < 1e-300:
            return -math.inf
        rest, log = rest / size, log + math.log10(size)
    return log - math.log10(math.sqrt(n - 1))


def radius(seen: Mask) -> float:
    """The fewest steps after which some token has reached all others, along what they see; infinite if none does."""
    n = len(seen)
    reached, steps = np.eye(n, dtype=bool), 0
    while not reached.all(0).any():  # column j: who has heard of j
        after = (seen.astype(int) @ reached.astype(int)) > 0
        if (after == reached).all():
            return math.inf
        reached, steps = after, steps + 1
    return steps


def ranks(values: list[float]) -> Array:
    """Places of values, ties sharing their mean."""
    order = np.argsort(values, kind="stable")
    places = np.empty(len(values))
    places[order] = np.arange(len(values))
    return np.array([places[[other == value for other in values]].mean() for value in values])


def rank_correlation(a: list[float], b: list[float]) -> float:
    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])

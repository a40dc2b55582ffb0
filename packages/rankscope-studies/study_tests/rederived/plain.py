"""Plain numpy for the re-derivations: weights, tokens, attention and norms written out, nothing of rankscope.

Tokens are the rows of `X = 1 x^T + e^s R`: their mean x, and what they differ by, R, with the logarithm of its size
apart, so that no fall is too deep. `left(X)` is `||X - mean|| / ||X||` in the Frobenius norm, here and in all files.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]  # [query, key]
Rng = np.random.Generator
DIRECT = 1e-8  # Scores that differ by more are exponentiated; of smaller ones exp(D) - 1 is D to eight digits


def normed(X: Array, eps: float = 0.0) -> Array:
    """LayerNorm without gain and bias."""
    X = X - X.mean(-1, keepdims=True)
    return X / np.sqrt(np.square(X).mean(-1, keepdims=True) + eps)


def softmax(scores: Array) -> Array:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def left(X: Array) -> float:
    """What is left of the differences between tokens, as a share of their size."""
    return float(np.linalg.norm(X - X.mean(0)) / np.linalg.norm(X))


def words(tokens: int, width: int, rng: Rng) -> Array:
    """Tokens as BERT's embedding draws them: word + position + one segment for all, normalised."""
    return normed(rng.normal(size=(tokens, width)) * math.sqrt(2) + rng.normal(size=width))


@dataclass(frozen=True)
class Heads:
    """Query, key, value and output matrices of one layer, `[width, width]`, cut into heads.

    Biases of keys drop out of the softmax; those of values and outputs are one vector that every token gets, `added`,
    since rows of attention sum to one.
    """

    W_Q: Array
    W_K: Array
    W_V: Array
    W_O: Array
    heads: int
    query_bias: Array | float = 0.0
    added: Array | float = 0.0

    def split(self, rows: Array) -> Array:
        """`[token, width]` as `[head, token, width of a head]`."""
        return rows.reshape(len(rows), self.heads, -1).swapaxes(0, 1)

    def scores(self, X: Array, Y: Array, bias: Array | float = 0.0) -> Array:
        """Scores of the queries of X with the keys of Y, `[head, X, Y]`."""
        size = math.sqrt(self.W_Q.shape[1] // self.heads)
        return self.split(X @ self.W_Q + bias) @ self.split(Y @ self.W_K).swapaxes(-1, -2) / size

    def out(self, P: Array, X: Array) -> Array:
        """`sum_h P_h X W_V,h W_O,h`."""
        mixed = P @ self.split(X @ self.W_V)
        return mixed.swapaxes(0, 1).reshape(mixed.shape[1], -1) @ self.W_O


def normal(size: float) -> Callable[[int, Rng], Array]:
    """Matrices of entries N(0, size)."""
    return lambda width, rng: size * rng.normal(size=(width, width))


def xavier(width: int, rng: Rng) -> Array:
    """Matrices of entries uniform up to sqrt(6 / (in + out))."""
    return math.sqrt(3 / width) * rng.uniform(-1, 1, size=(width, width))


def drawn(draw: Callable[[int, Rng], Array], width: int, heads: int, rng: Rng) -> Heads:
    W_Q, W_K, W_V, W_O = (draw(width, rng) for _ in range(4))
    return Heads(W_Q, W_K, W_V, W_O, heads)


def attended(layer: Heads, X: Array, seen: Mask | None = None) -> Array:
    """One layer of attention in floating point."""
    scores = layer.scores(X, X, layer.query_bias)
    return layer.out(softmax(scores if seen is None else np.where(seen, scores, -np.inf)), X) + layer.added


@dataclass(frozen=True)
class Fallen:
    """Tokens after a layer of attention alone, and what made them."""

    log10: float  # Of what is left
    log_distance: float  # Natural log of the largest distance of two tokens
    M: Array  # e^-log_scale (P - 1 p^T) by head: what attention differs by from row to row
    log_scale: float


def cubing(layers: list[Heads], X: Array) -> list[Fallen]:
    """Attention alone under a complete mask, layer by layer, however little is left of differences.

    With X = 1 x^T + e^s R the score of tokens i, j is [a constant of row i] + e^s c_j + e^2s D_ij, and for any row p
    of weights `P X W = 1 (..)^T + e^s (P - 1 p^T) R W`. While D can be told from rounding, P is the softmax; below,
    `P_ij - p_j = e^2s p_j (D_ij - sum_k p_k D_ik)` with p the softmax of e^s c alone: s becomes 3 s. The common token
    is `e^t x`, since small weights shrink it in every layer.
    """
    x, R, s, t = X.mean(0), X - X.mean(0), 0.0, 0.0
    fallen = []
    for layer in layers:
        common = x * math.exp(t)
        D = layer.scores(R, R) * math.exp(2 * s)
        c = layer.scores(common[None], R, layer.query_bias) * math.exp(s)
        p = softmax(c)
        if np.abs(D).max() > DIRECT:
            M, log_scale = softmax(c + D) - p, 0.0
        else:
            D, log_scale = layer.scores(R, R), 2 * s
            M = p * (D - (p * D).sum(-1, keepdims=True))
        common = (layer.out(p, common[None] + math.exp(s) * R) + layer.added)[0]
        R = layer.out(M, R)
        s += log_scale
        middle = R.mean(0)
        R, common = R - middle, common + math.exp(s) * middle
        rest, size = float(np.linalg.norm(R)), float(np.linalg.norm(common))
        R, s, x, t = R / rest, s + math.log(rest), common / size, math.log(size)
        whole = t + math.log(len(X) + math.exp(min(2 * (s - t), 50.0))) / 2
        apart = np.sqrt(np.square(R[:, None] - R).sum(-1).max())
        fallen.append(Fallen((s - whole) / math.log(10), s + math.log(apart), M, log_scale))
    return fallen


def fall_to(layers: list[Heads], X: Array) -> list[float]:
    """log10 of what is left after each layer of attention alone under a complete mask, the tokens' first."""
    return [math.log10(left(X)), *(step.log10 for step in cubing(layers, X))]

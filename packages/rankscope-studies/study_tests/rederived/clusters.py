"""Attention alone whose queries and keys are alike: many random networks side by side, in float64."""

import math

import numpy as np

from study_tests.rederived.plain import Array, normed, softmax

APART = 0.01  # Relative mu above which tokens are apart, as in the study


def ends(
    *,
    alike: float,
    gain: float,
    norm: str,
    width: int,
    heads: int,
    layers: int,
    tokens: int = 16,
    draws: int = 20,
    bias: float = 0.0,
    causal: bool = False,
    seed: int = 0,
) -> Array:
    """Tokens of each draw after the last layer, `[draw, token, width]`.

    Args:
        alike: The correlation of W_Q and W_K, entry by entry; 1: they are the same.
        gain: What scores are multiplied by.
        norm: 'layer': LayerNorm after each layer; 'common': one number for all tokens, so that their mean square is
            one; 'none'.
        width: Of tokens.
        heads: Of each layer.
        layers: Of the network.
        tokens: In each sample.
        draws: Networks, each with its own tokens.
        bias: Size of a bias N(0, bias) that each layer adds to all tokens before its norm.
        causal: Under a causal mask.
        seed: Of all draws.
    """
    rng = np.random.default_rng(seed)
    X = normed(rng.normal(size=(draws, tokens, width)))
    hidden = np.triu(np.full((tokens, tokens), -np.inf), 1) if causal else 0.0

    def matrix() -> Array:
        return math.sqrt(3 / width) * rng.uniform(-1, 1, size=(draws, width, width))

    def split(Y: Array) -> Array:
        return Y.reshape(draws, tokens, heads, -1).swapaxes(1, 2)

    for _ in range(layers):
        W_Q, other, W_V, W_O = (matrix() for _ in range(4))
        W_K = alike * W_Q + math.sqrt(1 - alike**2) * other
        scores = split(X @ W_Q) @ split(X @ W_K).swapaxes(-1, -2) * gain / math.sqrt(width // heads)
        X = (softmax(scores + hidden) @ split(X @ W_V)).swapaxes(1, 2).reshape(X.shape) @ W_O
        X = X + bias * rng.normal(size=(draws, 1, width)) if bias else X
        if norm == "layer":
            X = normed(X)
        elif norm == "common":
            X = X / np.sqrt(np.square(X).mean((1, 2), keepdims=True))
    return X


def relative(X: Array) -> Array:
    """What is left of differences, by draw."""
    return np.linalg.norm(X - X.mean(1, keepdims=True), axis=(1, 2)) / np.linalg.norm(X, axis=(1, 2))


def apart(X: Array) -> int:
    """How many draws are apart."""
    return int((relative(X) > APART).sum())


def rank(X: Array, share: float = 1e-3) -> Array:
    """How many singular values exceed a share of the largest, by draw."""
    sizes = np.linalg.svd(X, compute_uv=False)
    return (sizes > share * sizes[:, :1]).sum(1)


def opposite(X: Array) -> Array:
    """The smallest cosine of two tokens, by draw."""
    Y = X / np.linalg.norm(X, axis=-1, keepdims=True)
    return (Y @ Y.swapaxes(-1, -2)).min((1, 2))

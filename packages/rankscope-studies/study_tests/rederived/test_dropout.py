"""The plateau of dropout, and tokens that shrink under local masks: two things `mu` hides."""

import math
from dataclasses import replace

import numpy as np
import pytest

from study_tests.rederived.plain import Array, Heads, Mask, Rng, attended, drawn, left, normal, normed, softmax, words

BERT = normal(0.55 / math.sqrt(96))  # The gain of N(0, 0.02) at width 768


def dropped(X: Array, p: float, rng: Rng) -> Array:
    """Entries set to zero with a chance of p, the others divided by 1 - p."""
    return X * (rng.random(X.shape) >= p) / (1 - p)


def plateau(norm: bool, outputs: float, weights: float, seed: int, layers: int = 24) -> float:
    """What is left after so many layers of attention, a norm and dropout of outputs and of attention weights."""
    rng = np.random.default_rng(seed)
    X = words(48, 96, rng)
    for _ in range(layers):
        layer = drawn(BERT, 96, 3, rng)
        X = dropped(layer.out(dropped(softmax(layer.scores(X, X)), weights, rng), X), outputs, rng)
        X = normed(X, 1e-12) if norm else X
    return left(X)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.3])
def test_the_plateau_is_at_the_square_root_of_the_rate_with_a_norm_and_without(p: float) -> None:
    """Tokens that are all equal show sqrt(p) from fresh masks alone: an entry's mean square is 1 / (1 - p) of the
    square of its mean. Twenty-four layers of attention show the same, and LayerNorm changes nothing."""
    rng = np.random.default_rng(0)
    equal = left(dropped(np.ones((48, 1)) * rng.normal(size=96), p, rng))
    assert equal == pytest.approx(math.sqrt(p), rel=0.1)
    for norm in (True, False):
        assert plateau(norm, p, p, seed=1) == pytest.approx(math.sqrt(p), rel=0.2)


def test_dropout_of_outputs_makes_it_and_of_attention_weights_a_tenth_of_it() -> None:
    assert plateau(True, 0.1, 0.0, seed=2) == pytest.approx(math.sqrt(0.1), rel=0.15)
    assert plateau(True, 0.0, 0.1, seed=2) < 0.1
    assert plateau(True, 0.0, 0.0, seed=2) < 1e-12  # dropout off: collapsed as far as float64 can tell


def masked(layers: list[Heads], X: Array, seen: Mask) -> Array:
    for layer in layers:
        X = attended(layer, X, seen)
    return X


def test_under_a_local_mask_most_of_mus_fall_is_in_the_size_of_tokens() -> None:
    """128 layers, each of 48 tokens sees itself and the one before: mu falls by fifty decades and more, its share of
    the tokens by less than a tenth of them. Values twice as large leave the share as it is, and mu with it."""
    i, j = np.indices((48, 48))
    seen = (j <= i) & (i - j <= 1)

    def decades(layers: list[Heads], X: Array) -> tuple[float, float]:
        end = masked(layers, X, seen)
        sizes = [float(np.linalg.norm(Y - Y.mean(0))) for Y in (X, end)]
        return math.log10(sizes[1] / sizes[0]), math.log10(left(end) / left(X))

    for seed in range(3):
        rng = np.random.default_rng(seed)
        layers = [drawn(BERT, 96, 3, rng) for _ in range(128)]
        X = words(48, 96, rng)
        mu, share = decades(layers, X)
        assert mu < -50 and share > 0.1 * mu
        mu, share = decades([replace(layer, W_V=layer.W_V / 0.55, W_O=layer.W_O / 0.55) for layer in layers], X)
        assert mu > -10 and share > -10

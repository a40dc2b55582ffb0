"""A smaller score divisor slows the collapse of pure attention, until attention is one-hot."""

import math

import numpy as np
import pytest

from study_tests.rederived import minilm
from study_tests.rederived.plain import Array, Heads, attended, drawn, fall_to, left, normal, words


def last(layers: list[Heads], X: Array) -> float:
    for layer in layers:
        X = attended(layer, X)
    return left(X)


def test_in_random_networks_the_smaller_the_slower() -> None:
    """Three seeds, divisors 1 to 64: the log of what is left grows with each."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        layers, X = [drawn(normal(0.55 / math.sqrt(48)), 48, 4, rng) for _ in range(8)], words(16, 48, rng)
        ends = [
            fall_to([Heads(x.W_Q / divisor, x.W_K, x.W_V, x.W_O, x.heads) for x in layers], X)[-1]
            for divisor in (0.3, 1.0, 8.0, 64.0)
        ]
        assert ends == sorted(ends, reverse=True)


@pytest.mark.slow
def test_in_minilm_the_smallest_divisors_do_the_same() -> None:
    """Three texts, divisors of q.k: from 1 to 1/8 much more is left; from 1/8 to 1/512 it changes by less than 1.4
    times."""
    for text in minilm.TEXTS[:3]:
        ends = []
        for divisor in (1.0, 1 / 8, 1 / 64, 1 / 512):
            layers, tensors = minilm.network(divisor / math.sqrt(32))
            ends.append(last(layers, minilm.embedded(text, tensors, 32)))
        assert ends[0] < 0.1 < ends[1] and 1 / 1.4 < ends[2] / ends[1] < 1.4 and 1 / 1.4 < ends[3] / ends[2] < 1.4

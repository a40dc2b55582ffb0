"""Skips in networks with random weights: any weight ends the doubly exponential fall, and none ends every fall."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from study_tests.rederived.blocks import followed, stack
from study_tests.rederived.plain import Array, Rng, attended, left, words, xavier

Draw = Callable[[int, int, Rng], Array]


def uniform(inputs: int, outputs: int, rng: Rng) -> Array:
    """Xavier's."""
    return math.sqrt(6 / (inputs + outputs)) * rng.uniform(-1, 1, size=(inputs, outputs))


def normal(size: float) -> Draw:
    return lambda inputs, outputs, rng: size * rng.normal(size=(inputs, outputs))


def fallen(
    layers: int, skip: float, place: str, draw: Draw = uniform, width: int = 32, seed: int = 0, mlp: bool = True
) -> list[float]:
    rng = np.random.default_rng(seed)
    X = words(16, width, rng)
    return followed(stack(draw, layers, width, 2, rng, skip, place, mlp), X)


@pytest.mark.parametrize("place", ["post", "pre"])
@pytest.mark.parametrize("skip", [1e-6, 0.01, 0.25])
def test_any_weight_makes_the_fall_exponential(skip: float, place: str) -> None:
    """What falls by a factor has the same step in the 20 layers before the last 20 as in these; without a skip it
    has a step three times as large in every layer. The step is about log10 of the weight: 1e-6 does what 0.25 does."""
    logs = fallen(64, skip, place, mlp=False)
    early, late = (logs[44] - logs[24]) / 20, (logs[64] - logs[44]) / 20
    assert late == pytest.approx(early, rel=0.1) and late < 0
    assert math.log10(skip) - 0.4 < late < math.log10(skip) + 0.2


def test_the_algebra_in_floating_point() -> None:
    """About equal tokens attention is flat to second order: its Jacobian on differences is zero under a complete
    mask, so a layer `w X + attention(X)` multiplies small differences by w exactly, whatever w is."""
    rng = np.random.default_rng(1)
    (block,) = stack(uniform, 1, 16, 2, rng, 0.0, "none", mlp=False)
    x, R = words(1, 16, rng), rng.normal(size=(6, 16))
    R = R - R.mean(0)
    for size in (1e-2, 1e-3):
        after = attended(block.attention, x + size * R)
        assert np.linalg.norm(after - after.mean(0)) < 30 * size**3 * np.linalg.norm(R) ** 3


@pytest.mark.slow
def test_what_a_skip_leaves() -> None:
    """Three seeds of width 64: at 24 and 128 layers, weight 0.25, before and after attention; and with MLPs."""
    for place, at_24, at_128 in (("post", (-15, -13), (-80, -74)), ("pre", (-25, -19), (-131, -108))):
        ends = [fallen(128, 0.25, place, width=64, seed=seed) for seed in range(3)]
        assert all(at_24[0] < logs[24] < at_24[1] and at_128[0] < logs[-1] < at_128[1] for logs in ends)
    small = [fallen(128, 0.25, "post", normal(0.02), 64, seed) for seed in range(3)]
    assert all(logs[-1] > -0.5 for logs in small)  # branches so small that tokens do not move
    assert all(fallen(128, 0.25, "pre", normal(0.02), 64, seed)[24] < -12 for seed in range(3))


def whole(
    seed: int, place: str, size: float, width: int, layers: int = 128, mlp: bool = True
) -> tuple[list[float], list[float]]:
    """(what is left after each layer, its size mu) of networks with skips of weight one, 64 tokens, heads of 64."""
    rng = np.random.default_rng(seed)
    X = words(64, width, rng)
    shares, sizes = [left(X)], [float(np.linalg.norm(X - X.mean(0)))]
    for _ in range(layers):
        (block,) = stack(normal(size), 1, width, width // 64, rng, 1.0, place, mlp)
        X = block(X)
        shares.append(left(X))
        sizes.append(float(np.linalg.norm(X - X.mean(0))))
    return shares, sizes


def test_a_whole_network_draws_its_tokens_together_slowly() -> None:
    """Post-norm, weights whose gain is that of BERT's (0.02 sqrt(768) = 0.55): little at 12 layers, most at 48."""
    shares, _ = whole(0, "post", 0.55 / math.sqrt(64), 64, 48)
    assert shares[12] > 0.5 and shares[48] < 0.6 * shares[12]
    _, sizes = whole(0, "none", 0.55 / math.sqrt(64), 64, 48, mlp=False)
    shares, _ = whole(0, "none", 0.55 / math.sqrt(64), 64, 48, mlp=False)
    assert shares[48] < 0.5 * shares[0] and 0.8 < sizes[48] / sizes[0] < 1.3  # mu does not show it


@pytest.mark.slow
def test_128_layers_with_skips() -> None:
    """At BERT's gain post-norm falls to 0.004 to 0.016; pre-norm stays at half, and smaller gains hold tokens apart."""
    gain = 0.55 / math.sqrt(192)
    assert all(0.002 < whole(seed, "post", gain, 192)[0][-1] < 0.03 for seed in range(3))
    assert all(0.4 < whole(seed, "pre", gain, 192)[0][-1] < 0.6 for seed in range(2))
    assert all(0.6 < whole(seed, "post", 0.02, 192)[0][-1] < 0.75 for seed in range(2))


def test_xavier_is_the_same_in_both_files() -> None:
    """`uniform` and `plain.xavier` draw alike for square matrices."""
    a, b = (draw for draw in (uniform(8, 8, np.random.default_rng(0)), xavier(8, np.random.default_rng(0))))
    assert np.allclose(a, b)

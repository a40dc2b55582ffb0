"""The weights of source tokens under uniform attention, against whole numbers, integrals and sums over paths."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from rankscope.nets import Architecture, Transformer
from rankscope.paths import decompose
from rankscope_studies.chowdhury2026 import (
    attention_weights,
    averages,
    cumulative,
    density,
    exact_weights,
    independent_sizes,
    length_weights,
    uniform_network,
)
from tests.builders import awake, normal

LAYERS: dict[str, list[Fraction]] = {
    "one": [Fraction(1, 3)],
    "alike": [Fraction(1, 4)] * 5,
    "no skip": [Fraction(1)] * 4,
    "no attention": [Fraction(0)] * 3,
    "of each its own": [Fraction(1, 7), Fraction(5, 6), Fraction(1, 2), Fraction(0)],
}


def multiplied(n: int, a: list[Fraction]) -> list[Fraction]:
    """The last row of the product of `(1-a) I + a C`, matrix by matrix."""
    row = [Fraction(int(j == n)) for j in range(1, n + 1)]
    for weight in a:
        mixed = [sum((row[i - 1] / i for i in range(j, n + 1)), Fraction(0)) for j in range(1, n + 1)]
        row = [(1 - weight) * past + weight * through for past, through in zip(row, mixed, strict=True)]
    return row


def hausdorff(n: int, a: list[Fraction]) -> list[Fraction]:
    """`C(n-1, j-1) int t^(j-1) (1-t)^(n-j) rho dt`, with `(1-t)^(n-j)` multiplied out: differences of the moments."""
    moments = [math.prod((1 - weight + weight / (m + 1) for weight in a), start=Fraction(1)) for m in range(n)]
    return [
        math.comb(n - 1, j - 1) * sum((-1) ** i * math.comb(n - j, i) * moments[j - 1 + i] for i in range(n - j + 1))
        for j in range(1, n + 1)
    ]


@pytest.mark.parametrize("case", LAYERS)
@pytest.mark.parametrize("n", [1, 2, 7, 40])
def test_weights_are_the_products_of_layers_and_the_differences_of_moments(case: str, n: int) -> None:
    a = LAYERS[case]
    exact = multiplied(n, a)
    assert hausdorff(n, a) == exact and sum(exact) == 1
    mine = exact_weights(n, [float(weight) for weight in a])
    np.testing.assert_allclose(mine, [float(weight) for weight in exact], rtol=1e-12)


def test_powers_of_averages_by_hand() -> None:
    """C = [[1, 0], [1/2, 1/2]]: the last rows of its powers are (1 - 2^-k, 2^-k)."""
    assert averages(2, 3).tolist() == [[0, 1], [0.5, 0.5], [0.75, 0.25], [0.875, 0.125]]
    harmonic = [sum(1 / i for i in range(j, 6)) / 5 for j in range(1, 6)]  # Each i averages the first i, one after all
    np.testing.assert_allclose(averages(5, 2)[2], harmonic, rtol=1e-14)


@pytest.mark.parametrize("layers", [1, 3, 8])
@pytest.mark.parametrize("a", [0.0, 0.1, 0.6, 1.0])
@pytest.mark.parametrize("n", [3, 30])
def test_shares_by_paths_are_the_weights(layers: int, a: float, n: int) -> None:
    """On tokens that are all 1; and by length, the powers of averages as often as there are choices of layers."""
    d = decompose(uniform_network(layers, a), torch.ones(1, n, 1, dtype=torch.float64))
    found = d.by_position().table.filter(start="embedding")["share"].to_numpy()
    np.testing.assert_allclose(found, exact_weights(n, [a] * layers), rtol=1e-12, atol=1e-15)
    table = d.by_position(lengths=True).table.filter(start="embedding").sort("length", "source")
    by_length = table["share"].to_numpy().reshape(layers + 1, n)
    choices = np.array([math.comb(layers, k) * a**k * (1 - a) ** (layers - k) for k in range(layers + 1)])
    np.testing.assert_allclose(by_length, choices[:, None] * averages(n, layers), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(length_weights([a] * layers), choices, rtol=1e-12, atol=1e-15)


def test_sizes_of_terms_are_the_weights_of_other_tokens_too() -> None:
    d = decompose(uniform_network(4, 0.3), normal(2, 9, 1))
    table = d.by_position(sizes=True).table.filter(start="embedding")
    sizes = table["norm"].to_numpy().reshape(2, 9) / normal(2, 9, 1).abs()[..., 0].numpy()
    np.testing.assert_allclose(sizes, np.stack([exact_weights(9, [0.3] * 4)] * 2), rtol=1e-10)


def published(x: float, layers: int, a: float) -> float:
    """As the paper writes it, without the point mass."""
    return sum(
        math.comb(layers, k) * a**k * (1 - a) ** (layers - k) * math.log(1 / x) ** (k - 1) / math.factorial(k - 1)
        for k in range(1, layers + 1)
    )


@pytest.mark.parametrize(("layers", "a"), [(1, 0.4), (6, 0.1), (12, 0.5), (5, 1.0)])
def test_the_density_is_the_published_one(layers: int, a: float) -> None:
    x = np.array([1e-3, 0.02, 0.3, 0.5, 0.99])
    np.testing.assert_allclose(density(x, [a] * layers), [published(float(y), layers, a) for y in x], rtol=1e-12)
    cells = np.exp(np.linspace(np.log(1e-9), np.log(0.5), 200_001))
    middles = np.sqrt(cells[1:] * cells[:-1])
    summed = (density(middles, [a] * layers) * np.diff(cells)).sum()
    below, upto = cumulative(np.array([1e-9, 0.5]), [a] * layers)
    assert upto - below == pytest.approx(summed, rel=1e-6)
    assert cumulative(np.array([1.0]), [a] * layers)[0] == 1
    just_before = cumulative(np.array([1 - 1e-12]), [a] * layers)[0]
    assert 1 - just_before == pytest.approx((1 - a) ** layers, abs=1e-10)


def test_weights_tend_to_the_density() -> None:
    """In the middle by 1/n; at the first tokens the density says something else at every n."""
    a, gaps = [0.2] * 6, []
    for n in (64, 256, 1024):
        x = np.arange(1, n + 1) / n
        gaps.append(np.abs(n * exact_weights(n, a) / density(x, a) - 1)[n // 4 : n // 2].max())
        assert n * exact_weights(n, a)[0] > 1.15 * density(x, a)[0]
    assert gaps[1] < gaps[0] / 3.5 and gaps[2] < gaps[1] / 3.5


@pytest.mark.slow
def test_independent_sizes_are_those_of_random_values() -> None:
    """Mean squares over networks of uniform attention whose values are drawn anew in every layer."""
    n, layers, width, a = 6, 3, 24, 0.4
    arch = Architecture(
        layers=layers, width=width, heads=1, kernel="uniform", mask="causal", mlp="none", norm="none", biases=False,
        attention_skip=1 - a,
    )  # fmt: skip
    squares = np.zeros(n)
    networks = 150
    for seed in range(networks):
        drawn = Transformer.random(arch, seed=seed).state_dict()
        for name, tensor in drawn.items():
            if name.endswith("value.weight"):
                drawn[name] = normal(*tensor.shape, seed=seed * layers + int(name.split(".")[1])) / math.sqrt(width)
            elif name.endswith("output.weight"):
                drawn[name] = a * torch.eye(width, dtype=torch.float64).reshape(tensor.shape)
        X = normal(1, n, width, seed=10_000 + seed)
        X = X / torch.linalg.vector_norm(X, dim=-1, keepdim=True)
        d = decompose(Transformer.from_weights(arch, drawn), X)
        squares += d.by_position(sizes=True).table.filter(start="embedding")["norm"].to_numpy() ** 2
        assert attention_weights(d.frozen) == pytest.approx([a] * layers, rel=0.15)
    expected = independent_sizes(n, [a] * layers)
    np.testing.assert_allclose(np.sqrt(squares / networks), expected, rtol=0.06)
    assert np.abs(expected / exact_weights(n, [a] * layers) - 1).max() > 0.3  # Not the weights themselves


def test_weights_of_attention_count_norms_and_grouped_heads() -> None:
    """What attention that looks at one token alone does to unit tokens, on average over directions."""
    arch = Architecture(layers=2, width=6, heads=4, key_heads=2, head_width=3, norm_place="pre", norm="rms", mlp="none")
    net, X = awake(arch), normal(3, 5, 6)
    frozen = decompose(net, X).frozen
    found = attention_weights(frozen)
    for layer, weight in zip(frozen.layers, found, strict=True):
        w, gain = layer.block.weights.attention, layer.block.weights.attention_norm.gain
        assert gain is not None
        image = sum((torch.eye(6).double() * gain) @ w.value.weight[:, h // 2] @ w.output.weight[h] for h in range(4))
        states = X if layer is frozen.layers[0] else net.run(X).states[1]
        scale = (1 / (states.square().mean(-1) + arch.norm_eps)).mean().sqrt()
        b = float(scale * torch.linalg.matrix_norm(image) / math.sqrt(6))
        assert weight == pytest.approx(b / (1 + b), rel=1e-9)
    halved = Transformer.from_weights(replace(arch, attention_skip=0.5), net.state_dict())
    b = found[0] / (1 - found[0])
    assert attention_weights(decompose(halved, X).frozen)[0] == pytest.approx(b / (0.5 + b), rel=1e-9)

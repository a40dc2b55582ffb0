"""What certificates are made of, computed a second time by loops, grids and brute force."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.nets import Architecture, Transformer, mask_matrix
from rankscope.nets.mlp import ACTIVATIONS
from rankscope.theory import certify
from rankscope.theory.sphere import hemisphere, reaching
from rankscope.theory.weight_norms import LIPSCHITZ
from tests.builders import normal
from tests.theory.families import EVERY_MASK, SAN, net_of
from tests.theory.plain import distances, mu, reach


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_lipschitz_constants_are_the_largest_slopes(name: str) -> None:
    """By automatic differentiation on a grid that is fine where slopes are largest."""
    z = torch.linspace(-12, 12, 2_400_001, dtype=torch.float64, requires_grad=True)
    ACTIVATIONS[name](z).sum().backward()
    assert z.grad is not None
    most = float(z.grad.abs().max())
    assert most <= LIPSCHITZ[name] <= most + 1e-4


@settings(max_examples=30)
@given(st.sampled_from(EVERY_MASK), st.integers(1, 9), st.integers(0, 9))
def test_who_reaches_all_by_floyd_and_warshall(mask: str, n: int, steps: int) -> None:
    far = [max(row) for row in distances(mask, n)]
    assert reaching(mask_matrix(mask, n), steps) == sum(each <= steps for each in far)


@pytest.mark.parametrize("mask", ["complete", "causal", "window:1", "unidirectional", "longformer:1:1"])
@pytest.mark.parametrize("heads", [1, 2])
def test_masked_attention_path_by_path(mask: str, heads: int) -> None:
    """Thm 1 of Wu et al. by all H^t products of attention and of values: each contracts as is claimed, their
    sum is the residual, and the certificate's bound lies above the sum of the paths' bounds."""
    layers, n, d = 4, 4, 4
    net = net_of(seed=5, layers=layers, heads=heads, mask=mask, biases=False, **SAN)
    X = normal(1, n, d, seed=6)
    run = net.run(X, attention=True)
    radius, _ = reach(mask, n)
    eps = min(float(P[0][:, mask_matrix(mask, n)].min()) for P in run.attention)
    shrink = (1 - eps**radius) ** (layers // radius)
    spread = float((X[0].amax(0) - X[0].amin(0)).norm())
    total, bounds = torch.zeros(n, d, dtype=torch.float64), 0.0
    for path in itertools.product(range(heads), repeat=layers):
        P, W = torch.eye(n, dtype=torch.float64), torch.eye(d, dtype=torch.float64)
        for layer, head in enumerate(path):
            w = net.weights.layers[layer].attention
            P, W = run.attention[layer][0, head] @ P, W @ w.value.weight[:, head] @ w.output.weight[head]
        tau = max(float((a - b).abs().sum()) / 2 for a in P for b in P)
        assert tau <= shrink + 1e-12
        bound = math.sqrt(n) / 2 * spread * shrink * float(torch.linalg.matrix_norm(W, 2))
        assert float(mu(P @ X[0] @ W)) <= bound
        total, bounds = total + P @ X[0] @ W, bounds + bound
    torch.testing.assert_close(total, run.output[0])
    row = certify(net, X, theorems="wu2024-1").table.row(layers - 1, named=True)
    assert row["met"] and row["log10_measured"] == pytest.approx(math.log10(float(mu(total))), abs=1e-9)
    assert row["log10_bound"] >= math.log10(bounds) - 1e-12
    if heads == 1:
        assert row["log10_bound"] == pytest.approx(math.log10(bounds), abs=1e-9)


@pytest.mark.parametrize("n", [2, 3, 6, 30, 300])
def test_the_hemisphere_by_search(n: int) -> None:
    """No random direction has a larger smallest cosine than the one that least squares finds."""
    Y = torch.nn.functional.normalize(normal(n, 3, seed=n) + torch.tensor([1.5, 1.5, 0.0]).double(), dim=-1)
    w, alpha = hemisphere(Y)
    tries = torch.nn.functional.normalize(normal(20000, 3, seed=1), dim=-1)
    best = float((Y @ tries.mT).amin(0).max())
    if alpha > 1e-6:
        assert float(w.norm()) == pytest.approx(1.0) and best <= alpha + 1e-9
    else:
        assert best <= 1e-6


def test_a_norm_with_eps_stretches_by_one_over_the_smallest_deviation() -> None:
    """Dobrushin's factor of a block, norm by norm, from loops over tokens."""
    arch = Architecture(layers=1, width=5, heads=1, mlp="gated", mlp_width=4, norm="rms", norm_place="pre",
                        norm_eps=1e-2, activation="silu", biases=True)  # fmt: skip
    tensors = Transformer.random(arch, 0, "xavier").state()
    tensors = {name: W + 0.3 * normal(*W.shape, seed=place) for place, (name, W) in enumerate(tensors.items())}
    net, X = Transformer.from_weights(arch, tensors), normal(1, 6, 5, seed=9)

    def rms(Y: torch.Tensor, gain: torch.Tensor) -> tuple[torch.Tensor, float]:
        sd = torch.tensor([math.sqrt(sum(float(e) ** 2 for e in y) / 5 + 1e-2) for y in Y], dtype=Y.dtype)
        return Y / sd[:, None] * gain, float(gain.abs().max() / sd.min())

    def norm2(W: torch.Tensor) -> float:
        return float(torch.linalg.matrix_norm(W, 2))

    at = {name.removeprefix("layers.0."): W for name, W in tensors.items()}
    run = net.run(X, attention=True)
    P = run.attention[0][0, 0]
    tau = max(sum(abs(float(a - b)) for a, b in zip(P[i], P[j], strict=True)) / 2
              for i in range(6) for j in range(6))  # fmt: skip
    inside, first = rms(X[0], at["attention_norm.gain"])
    values = norm2(at["attention.value.weight"][:, 0] @ at["attention.output.weight"][0])
    factor = 1 + tau * values * first
    spoken = P @ (inside @ at["attention.value.weight"][:, 0] + at["attention.value.bias"][0])
    middle = X[0] + spoken @ at["attention.output.weight"][0] + at["attention.output.bias"]
    inside, second = rms(middle, at["mlp_norm.gain"])
    up = inside @ at["mlp.up.weight"] + at["mlp.up.bias"]
    gate = inside @ at["mlp.gate.weight"] + at["mlp.gate.bias"]
    opened, largest = float(torch.nn.functional.silu(gate).abs().max()), float(up.abs().max())
    lip = norm2(at["mlp.down.weight"]) * (
        opened * norm2(at["mlp.up.weight"]) + LIPSCHITZ["silu"] * largest * norm2(at["mlp.gate.weight"])
    )
    factor *= 1 + lip * second
    start = max(float((a - b).norm()) for a in X[0] for b in X[0])
    row = certify(net, X, theorems="dobrushin").table.row(0, named=True)
    assert row["log10_bound"] == pytest.approx(math.log10(factor * start), abs=1e-9)
    assert row["met"] and row["slack"] > 0

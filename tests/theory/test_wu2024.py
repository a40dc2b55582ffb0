"""Thm 1 of Wu et al. 2024, path by path."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.nets import Transformer, mask_matrix
from rankscope.theory import certify
from rankscope.theory.wu2024 import hemisphere, reaching
from tests.builders import normal
from tests.theory.families import EVERY_MASK, SAN, SPHERE, net_of
from tests.theory.plain import distances, mu, reach


@pytest.mark.sampled(2)
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


def test_values_that_are_zero_end_the_bound() -> None:
    """Values of the second of three layers alone: tokens are equal from there on."""
    net = net_of(seed=5, layers=3, heads=1, mask="causal", biases=False, **SAN)
    name = "layers.1.attention.value.weight"
    state = {**net.state_dict(), name: torch.zeros_like(net.state_dict()[name])}
    found = certify(Transformer.from_weights(net.arch, state), normal(1, 3, 4, seed=6), theorems="wu2024-1").table
    assert found["met"].all() and found["log10_bound"].is_finite().to_list() == [True, False, False]
    for column in ("log10_bound", "log10_measured"):
        assert found[column].to_list()[1:] == [-math.inf, -math.inf]


@settings(max_examples=30)
@given(st.sampled_from(EVERY_MASK), st.integers(1, 9), st.integers(0, 9))
def test_who_reaches_all_by_floyd_and_warshall(mask: str, n: int, steps: int) -> None:
    far = [max(row) for row in distances(mask, n)]
    assert reaching(mask_matrix(mask, n), steps) == sum(each <= steps for each in far)


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


def test_close_tokens_among_many_on_a_sphere() -> None:
    """Tokens that differ by 1e-10 among forty: distances must not be taken by products of lengths."""
    net = net_of("orthogonal", width=3, mask="unidirectional", **SPHERE)
    for close in (1e-4, 1e-8, 1e-10, 1e-14):
        X = 1 + close * normal(1, 40, 3)
        found = certify(net, X, theorems=["hemisphere", "wu2024-cor1"])
        assert found.table["met"].all() and found.broken().is_empty()
        assert float(found.of("hemisphere")["slack"].max()) < 1.0  # type: ignore[arg-type]

"""Thm 1 of Wu et al. 2024, path by path."""

import itertools
import math

import pytest
import torch

from rankscope.nets import Transformer, mask_matrix
from rankscope.theory import certify
from tests.builders import normal
from tests.theory.families import SAN, net_of
from tests.theory.plain import mu, reach


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
    state = {**net.state(), name: torch.zeros_like(net.state()[name])}
    found = certify(Transformer.from_weights(net.arch, state), normal(1, 3, 4, seed=6), theorems="wu2024-1").table
    assert found["met"].all() and found["log10_bound"].is_finite().to_list() == [True, False, False]
    for column in ("log10_bound", "log10_measured"):
        assert found[column].to_list()[1:] == [-math.inf, -math.inf]

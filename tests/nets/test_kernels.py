"""Every kernel against its definition, written out entry by entry."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from rankscope.nets import Architecture, Transformer, mask_matrix
from rankscope.nets.weights import Linear

N, WIDTH, HEADS = 5, 8, 2


def project(X: Tensor, linear: Linear) -> Tensor:
    """[batch, head, token, head_width] of queries, keys or values."""
    assert linear.bias is not None
    return torch.einsum("btd,dhc->bhtc", X, linear.weight) + linear.bias[:, None]


def attention_of(kernel: str, mask: str) -> tuple[Tensor, np.ndarray, np.ndarray, Transformer, Tensor]:
    arch = Architecture(layers=1, width=WIDTH, heads=HEADS, kernel=kernel, mask=mask, divisor=1.7, length=N, mlp="none")
    net = Transformer.random(arch, seed=3, init="xavier")
    X = torch.randn(1, N, WIDTH, dtype=torch.float64)
    w = net.weights.layers[0].attention
    return (
        net.run(X, attention=True).attention[0][0],
        project(X, w.query)[0].numpy(),
        project(X, w.key)[0].numpy(),
        net,
        X,
    )


def elu1(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


WEIGHT: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "softmax": lambda q, k: math.exp(q @ k / 1.7),
    "gaussian": lambda q, k: math.exp(-((q - k) @ (q - k)) / (2 * 1.7)),
    "uniform": lambda q, k: 1.0,
    "linear": lambda q, k: float(elu1(q) @ elu1(k)),
}


@pytest.mark.parametrize("mask", ["complete", "causal", "window:1"])
@pytest.mark.parametrize("kernel", WEIGHT)
def test_normalised_kernels(kernel: str, mask: str) -> None:
    P, q, k, _, _ = attention_of(kernel, mask)
    M = mask_matrix(mask, N).tolist()
    for h in range(HEADS):
        for i in range(N):
            row = [WEIGHT[kernel](q[h, i], k[h, j]) if M[i][j] else 0.0 for j in range(N)]
            assert P[h, i].tolist() == pytest.approx([w / sum(row) for w in row], rel=1e-12)


@pytest.mark.parametrize("mask", ["complete", "causal"])
def test_sigmoid(mask: str) -> None:
    P, q, k, _, _ = attention_of("sigmoid", mask)
    M = mask_matrix(mask, N).tolist()
    for h in range(HEADS):
        for i in range(N):
            seen = sum(M[i])
            row = [1 / (1 + seen * math.exp(-(q[h, i] @ k[h, j]) / 1.7)) if M[i][j] else 0.0 for j in range(N)]
            assert P[h, i].tolist() == pytest.approx(row, rel=1e-12)


def test_linformer_attends_to_mixtures() -> None:
    P, q, k, net, X = attention_of("linformer:3", "complete")
    w = net.weights.layers[0].attention
    assert w.mix_keys is not None and w.mix_values is not None
    E, F, v = w.mix_keys.numpy(), w.mix_values.numpy(), project(X, w.value)[0].numpy()
    for h in range(HEADS):
        scores = np.exp(q[h] @ (E @ k[h]).T / 1.7)
        expected = scores / scores.sum(-1, keepdims=True) @ (F @ v[h])
        assert np.allclose(P[h].numpy() @ v[h], expected, rtol=1e-12)


def test_a_smaller_divisor_sharpens() -> None:
    net = Transformer.random(Architecture(layers=1, width=WIDTH, heads=HEADS), init="xavier")
    X = torch.randn(2, N, WIDTH, dtype=torch.float64)
    largest = [
        net.variant(divisor=divisor).run(X, attention=True).attention[0].amax(-1).mean() for divisor in (0.1, 1.0, 10.0)
    ]
    assert largest[0] > largest[1] > largest[2]

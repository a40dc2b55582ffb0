"""Every kernel against its definition, written out entry by entry."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from rankscope.errors import ArchitectureError
from rankscope.nets import Architecture, Linear, Transformer, mask_matrix
from rankscope.profiles import measure
from tests.builders import awake
from tests.raising import raises

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


@pytest.mark.parametrize("mask", ["complete", "causal"])
def test_a_sink_takes_its_part_of_every_row(mask: str) -> None:
    """gpt-oss: one more score in the sum that each row is divided by."""
    arch = Architecture(layers=1, width=WIDTH, heads=HEADS, kernel="sink", mask=mask, divisor=1.7, mlp="none")
    net, X = awake(arch, seed=3), torch.randn(1, N, WIDTH, dtype=torch.float64)
    w, M = net.weights.layers[0].attention, mask_matrix(mask, N).tolist()
    q, k = project(X, w.query)[0].numpy(), project(X, w.key)[0].numpy()
    P = net.run(X, attention=True).attention[0][0]
    assert w.sink is not None and (P.sum(-1) < 1).all()
    for h in range(HEADS):
        for i in range(N):
            row = [math.exp(q[h, i] @ k[h, j] / 1.7) if M[i][j] else 0.0 for j in range(N)]
            total = sum(row) + math.exp(float(w.sink[h]))
            assert P[h, i].tolist() == pytest.approx([weight / total for weight in row], rel=1e-12)


def test_sinks_are_weights_that_another_kernel_lacks() -> None:
    arch = Architecture(layers=1, width=WIDTH, heads=HEADS, kernel="sink")
    net, X = awake(arch), torch.randn(1, N, WIDTH, dtype=torch.float64)
    profile = measure(net, X)
    assert (
        profile.arithmetics == ["float64"]
        and float(profile.manifest.networks[0].checks["largest_row_sum_defect"]) > 0.01
    )
    soft = net.variant(kernel="softmax")
    assert not any("sink" in name for name in soft.state_dict()) and soft.run(X).output.shape == X.shape
    with raises(ArchitectureError, "kernel"):
        soft.variant(kernel="sink")
    with raises(ArchitectureError, "cross_attention"):
        arch.replace(cross_attention=True)

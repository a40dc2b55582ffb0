"""What a half block stretches distances by, from loops over tokens."""

import math

import pytest
import torch

from rankscope.nets import Architecture, Transformer
from rankscope.theory import certify
from rankscope.theory.weight_norms import LIPSCHITZ
from tests.builders import normal


def test_a_norm_with_eps_stretches_by_one_over_the_smallest_deviation() -> None:
    """Dobrushin's factor of a block, norm by norm, from loops over tokens."""
    arch = Architecture(layers=1, width=5, heads=1, mlp="gated", mlp_width=4, norm="rms", norm_place="pre",
                        norm_eps=1e-2, activation="silu", biases=True)  # fmt: skip
    tensors = Transformer.random(arch, 0, "xavier").state_dict()
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

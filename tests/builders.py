"""Tokens and networks that many tests build."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from rankscope.nets import Architecture, Transformer


def thinned(*axes: Sequence[Any]) -> list[Any]:
    """Every combination of the axes, for `parametrize`. About a third of them, with every value of each axis,
    are run always; the others are slow."""
    combinations = list(product(*(range(len(axis)) for axis in axes)))
    kept = [places for places in combinations if sum(places) % 3 == 0]
    for places in combinations:
        if any(all(each[axis] != k for each in kept) for axis, k in enumerate(places)):
            kept.append(places)
    return [
        pytest.param(
            *(axis[k] for axis, k in zip(axes, places, strict=True)), marks=() if places in kept else pytest.mark.slow
        )
        for places in combinations
    ]


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def awake(arch: Architecture, seed: int = 0, size: float = 0.3) -> Transformer:
    """A random network whose biases and gains are off their initial zero and one."""
    generator = torch.Generator().manual_seed(seed)
    tensors = Transformer.random(arch, seed=seed, init="xavier").state_dict()
    for name, tensor in tensors.items():
        if name.endswith(("bias", "gain", "correction", "sink")):
            tensors[name] = tensor + size * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    return Transformer.from_weights(arch, tensors)


def one_head(arch: Architecture, **parts: Tensor) -> Transformer:
    """Every layer the same head, of `query`, `key`, `value` and `output` `[width, width]`, the identity where
    left out, and of `query_bias` and the like."""
    eye, tensors = torch.eye(arch.width, dtype=torch.float64), {}
    for part in ("query", "key", "value", "output"):
        weight = parts.pop(part, eye)
        tensors[f"{part}.weight"] = weight[None] if part == "output" else weight[:, None]
    tensors |= {name.replace("_", "."): bias for name, bias in parts.items()}
    layers = range(1 if arch.shared else arch.layers)
    named = {f"layers.{k}.attention.{name}": tensor for k in layers for name, tensor in tensors.items()}
    return Transformer.from_weights(arch, named)

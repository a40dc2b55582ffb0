"""Norms of weights (`weight_norms.py`, on the CPU) where a network is: those that facts of its layers are made of.

They cross over as one tensor (`packed`), which a captured graph takes as an input (`observation.py`), and are taken
apart there (`unpacked`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from rankscope.shapes import Float
from rankscope.theory.weight_norms import LayerNorms

PackedNorms = Float[Tensor, " number"]


@dataclass(frozen=True)
class DeviceNorms:
    """Norms of one layer's weights: logs of those of active heads, and those of its MLP as they are."""

    columns: Float[Tensor, " head"]
    rows: Float[Tensor, " head"]
    spectral: Float[Tensor, " head"]
    mlp: Float[Tensor, " 4"]  # `MLPNorms`: spectral, up, gate and down


def packed(layers: Sequence[LayerNorms], device: torch.device) -> PackedNorms:
    """The norms of these layers, one after the other."""
    of_mlps = torch.tensor([[mlp.spectral, mlp.up, mlp.gate, mlp.down] for _, mlp in layers], dtype=torch.float64)
    of_heads = [[heads.logs[name] for name in ("columns", "rows", "spectral")] for heads, _ in layers]
    return torch.cat([*chain.from_iterable([*heads, mlp] for heads, mlp in zip(of_heads, of_mlps, strict=True))]).to(
        device
    )


def unpacked(numbers: PackedNorms, heads: Sequence[int]) -> list[DeviceNorms]:
    """The norms of each layer from those `packed`; `heads` says how many are active in each."""
    tensors = iter(torch.split(numbers, [size for count in heads for size in (count, count, count, 4)]))
    return [DeviceNorms(*of_layer) for of_layer in zip(tensors, tensors, tensors, tensors, strict=True)]

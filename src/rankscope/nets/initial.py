"""Random weights, by the schemes the papers use.

| init         | queries, keys, MLP     | values and outputs                                       |
|--------------|------------------------|----------------------------------------------------------|
| `bert`       | N(0, 0.02)             | N(0, 0.02)                                               |
| `xavier`     | U(+-sqrt(6/(in+out)))  | the same                                                 |
| `kaiming`    | N(0, 0.02)             | U(+-1/sqrt(in)): `kaiming_uniform_(a=sqrt 5)`, as in the 2021 code |
| `orthogonal` | as xavier              | orthonormal rows or columns (Wu et al. 2024, Thm 2)      |

`"bert/sqrt(L)"` and its like divide what each branch adds by sqrt(layers): the `1/sqrt(L)` skip scaling
of Noci et al. 2022. Biases are 0 and gains 1; tables of positions are N(0, 0.02), Linformer's mixers
N(0, 1/k). Everything is drawn in float64 on the CPU, so a seed means the same on every device.
"""

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

from rankscope.errors import ArchitectureError, one_of
from rankscope.nets.architecture import Architecture
from rankscope.nets.tensors import Shape, part_tensors, shapes

Draw = Callable[[Shape, int, int, Generator], Tensor]  # (shape, inputs, outputs, generator) -> weights


def _normal(shape: Shape, inputs: int, outputs: int, generator: Generator) -> Tensor:
    return 0.02 * torch.randn(shape, generator=generator, dtype=torch.float64)


def _uniform(bound: float, shape: Shape, generator: Generator) -> Tensor:
    return bound * (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1)


def _xavier(shape: Shape, inputs: int, outputs: int, generator: Generator) -> Tensor:
    return _uniform(math.sqrt(6 / (inputs + outputs)), shape, generator)


def _kaiming(shape: Shape, inputs: int, outputs: int, generator: Generator) -> Tensor:
    return _uniform(1 / math.sqrt(inputs), shape, generator)


def _orthogonal(shape: Shape, inputs: int, outputs: int, generator: Generator) -> Tensor:
    flat = torch.empty(inputs, outputs, dtype=torch.float64)
    return torch.nn.init.orthogonal_(flat, generator=generator).reshape(shape)


SCHEMES: dict[str, tuple[Draw, Draw]] = {
    "bert": (_normal, _normal),
    "xavier": (_xavier, _xavier),
    "kaiming": (_normal, _kaiming),
    "orthogonal": (_xavier, _orthogonal),
}
"""(for most matrices, for values and outputs)."""

DEPTH_SCALED = "/sqrt(L)"
OUTWARD = ("attention.value", "attention.output", "cross.value", "cross.output")


def random_tensors(arch: Architecture, seed: int, init: str) -> dict[str, Tensor]:
    """Every tensor of `shapes(arch)`, drawn by a scheme."""
    scheme = init.removesuffix(DEPTH_SCALED)
    if scheme not in SCHEMES:
        known = [*SCHEMES, *(name + DEPTH_SCALED for name in SCHEMES)]
        raise ArchitectureError(one_of("init", init, known), subject="init")
    usual, outward = SCHEMES[scheme]
    branch = 1 / math.sqrt(arch.layers) if init.endswith(DEPTH_SCALED) else 1.0
    generator = Generator().manual_seed(seed)
    drawn = {
        name: _tensor(name, shape, usual, outward, branch, generator)
        for name, shape in shapes(arch).items()
        if ".parts." not in name
    }
    # Parts are drawn last: with them or without, the rest is the same.
    for index in range(1 if arch.shared else arch.layers):
        tensors = part_tensors(arch, index, generator)
        drawn |= {f"layers.{index}.{name}": tensor for name, tensor in tensors.items()}
    return drawn


def _tensor(name: str, shape: Shape, usual: Draw, outward: Draw, branch: float, generator: Generator) -> Tensor:
    part, _, leaf = name.rpartition(".")
    if leaf in ("bias", "content_bias", "position_bias", "correction", "sink"):
        return torch.zeros(shape, dtype=torch.float64)
    if leaf == "gain":
        return torch.ones(shape, dtype=torch.float64)
    if leaf in ("positions", "bias_table", "relative_table"):
        return _normal(shape, 0, 0, generator)
    if leaf.startswith("mix_"):
        return torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[0])
    inputs = shape[0] * shape[1] if part.endswith(("attention.output", "cross.output")) else shape[0]
    outputs = math.prod(shape) // inputs
    if part.endswith(("experts.up", "experts.gate", "experts.down")):  # each expert is a map of its own
        inputs, outputs = shape[1] if part.endswith("down") else shape[0], shape[2]
    weight = (outward if part.endswith(OUTWARD) else usual)(shape, inputs, outputs, generator)
    ends_branch = part.endswith(("attention.output", "cross.output", "mlp.down", "experts.down", "shared.down"))
    return weight * branch if ends_branch else weight

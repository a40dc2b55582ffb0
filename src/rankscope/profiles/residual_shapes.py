"""The residual of a layer as a shape and a scale, at any depth.

Made by `LayerStep.residual`; `ShapeReader` keeps it for the cloud, `SpectrumReader` its singular values.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from rankscope.deviation.scaled import LOWEST
from rankscope.shapes import Float


class ResidualShape(NamedTuple):
    """The residual of one layer, `res X = 10^log10 |X|_F R`."""

    layer: int
    R: Float[Tensor, "batch token width"]
    """Of Frobenius norm one, zero at padded tokens; zero where tokens are equal."""
    log10: Float[Tensor, " batch"]
    """Its share of the tokens' norm; -inf where tokens are equal, NaN where numbers overflow."""


LAYERS = 33
"""The most layers that are kept: of a deeper network so many evenly, its ends among them."""


@cache
def sampled_layers(depth: int, most: int = LAYERS) -> frozenset[int]:
    """The layers of a network of this depth that are kept.

    >>> sorted(sampled_layers(1000, 3))
    [0, 500, 1000]
    """
    return frozenset(
        range(depth + 1) if depth < most else (round(k * depth / (most - 1)) for k in range(most))
    )


def residual_shape(layer: int, R: Tensor, log: Tensor, log_norm: Tensor) -> ResidualShape:
    """The shape and scale of the residual `e^log R` of tokens whose norm is `e^log_norm`."""
    largest = R.abs().amax((1, 2))
    unit = R / largest.masked_fill(largest == 0, 1.0)[:, None, None]  # so that squares stay in range
    size = torch.linalg.vector_norm(unit, dim=(1, 2))
    zero = (size == 0) | (log <= LOWEST)
    size = size.masked_fill(size == 0, 1.0)
    log10 = (log + largest.masked_fill(largest == 0, 1.0).log() + size.log() - log_norm) / math.log(10)
    return ResidualShape(layer, unit / size[:, None, None], log10.masked_fill(zero, -torch.inf).cpu())

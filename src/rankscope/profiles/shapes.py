"""The residual layer by layer as a shape and a scale, at any depth: what the cloud and the spectra are of."""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from rankscope.deviation.scaled import LOWEST
from rankscope.shapes import Float


class Shape(NamedTuple):
    """The residual of one layer, `res X = 10^log10 |X|_F R`."""

    layer: int
    R: Float[Tensor, "batch token width"]
    """Of Frobenius norm one, zero at padded tokens; zero where tokens are equal."""
    log10: Float[Tensor, " batch"]
    """Its share of the tokens' norm; -inf where tokens are equal, NaN where numbers overflow."""


LAYERS = 33
"""Layers that are looked at, at most: of a deeper network so many evenly, its ends among them."""


@cache
def explored(depth: int, most: int = LAYERS) -> frozenset[int]:
    """The layers of a network of this depth that are looked at.

    >>> sorted(looked_at(1000, 3))
    [0, 500, 1000]
    """
    return frozenset(
        range(depth + 1) if depth < most else (round(k * depth / (most - 1)) for k in range(most))
    )


def shape_of(layer: int, R: Tensor, log: Tensor, whole: Tensor) -> Shape:
    """Of the residual `e^log R` of tokens whose norm is `e^whole`."""
    largest = R.abs().amax((1, 2))
    unit = R / largest.masked_fill(largest == 0, 1.0)[:, None, None]  # so that squares stay in range
    size = torch.linalg.vector_norm(unit, dim=(1, 2))
    zero = (size == 0) | (log <= LOWEST)
    size = size.masked_fill(size == 0, 1.0)
    log10 = (log + largest.masked_fill(largest == 0, 1.0).log() + size.log() - whole) / math.log(10)
    return Shape(layer, unit / size[:, None, None], log10.masked_fill(zero, -torch.inf).cpu())

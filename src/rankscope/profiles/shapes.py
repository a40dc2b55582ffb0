"""The residual layer by layer as a shape and a scale, at any depth: what the cloud and the spectra are of."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope.deviation import applies, propagate
from rankscope.deviation.propagate import DeviationStep
from rankscope.deviation.scaled import LOWEST
from rankscope.metrics.tokens import real_tokens
from rankscope.nets import Transformer


class Shape(NamedTuple):
    """The residual of one layer, `res X = 10^log10 |X|_F R`."""

    layer: int
    R: Float[Tensor, "batch token width"]
    """Of Frobenius norm one, zero at padded tokens; zero where tokens are equal."""
    log10: Float[Tensor, " batch"]
    """Its share of the tokens' norm; -inf where tokens are equal, NaN where numbers overflow."""


LAYERS = 33
"""Layers that are looked at, at most: of a deeper network so many evenly, its ends among them."""


def looked_at(depth: int, most: int = LAYERS) -> set[int]:
    """The layers of a network of this depth that are looked at.

    >>> sorted(looked_at(1000, 3))
    [0, 500, 1000]
    """
    return set(range(depth + 1)) if depth < most else {round(k * depth / (most - 1)) for k in range(most)}


def shapes(net: Transformer, X: Tensor, padding: Tensor | None = None) -> Iterator[Shape]:
    """The residual layer by layer in deviation arithmetic, layer 0 the input; in float64 where the kernel has
    no rule in it."""
    chosen = looked_at(net.arch.layers)
    cast = net.to(torch.float64)
    X = X.to(dtype=torch.float64, device=cast.device)
    real = real_tokens(X.shape[:-1], padding, X.device)
    with torch.no_grad():
        if applies(cast):
            for step in propagate(cast, X, ~real):
                if step.layer in chosen:
                    yield shape_of(step)
        else:
            for plain in cast.steps(X, ~real):
                if plain.layer not in chosen:
                    continue
                state = plain.state * real[..., None]
                mean = state.sum(1, keepdim=True) / real.sum(-1).clamp(min=1)[:, None, None]
                whole = torch.linalg.vector_norm(state, dim=(1, 2)).log()
                yield _shape(plain.layer, (state - mean) * real[..., None], torch.zeros_like(whole), whole)


def shape_of(step: DeviationStep) -> Shape:
    """The residual of one step."""
    _, R = step.state.centred()
    whole = torch.linalg.vector_norm(step.state.tokens(step.state.log), dim=(1, 2)).log()
    return _shape(step.layer, R.value, R.log, whole + step.state.log)


def _shape(layer: int, R: Tensor, log: Tensor, whole: Tensor) -> Shape:
    largest = R.abs().amax((1, 2))
    unit = R / largest.masked_fill(largest == 0, 1.0)[:, None, None]  # so that squares stay in range
    size = torch.linalg.vector_norm(unit, dim=(1, 2))
    zero = (size == 0) | (log <= LOWEST)
    size = size.masked_fill(size == 0, 1.0)
    log10 = (log + largest.masked_fill(largest == 0, 1.0).log() + size.log() - whole) / math.log(10)
    return Shape(layer, unit / size[:, None, None], log10.masked_fill(zero, -torch.inf).cpu())

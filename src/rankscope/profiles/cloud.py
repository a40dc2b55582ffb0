"""The tokens of every layer as points of a plane: one plane for all layers.

The axes are the two leading principal directions of the residuals of all layers of all variants together, as
shares of their tokens' norm: where variants begin with the same tokens, they begin with the same picture. One
row per variant, sample, layer and token:

    variant · sample · layer · token · text · x · y · log10_scale · shown

x and y are in units of the layer's own spread (the root mean square over tokens of their distance from the
mean is one); times `10^log10_scale` they are in units of a token's own length (root mean square). `shown` is
the share of the layer's variance that lies in the plane.
"""

import math
from collections.abc import Mapping, Sequence

import polars as pl
import torch
from torch import Tensor

from rankscope.metrics.tokens import real_tokens
from rankscope.nets import Transformer
from rankscope.profiles.propagation import one_pass
from rankscope.profiles.readers import ShapeReader
from rankscope.profiles.shapes import Shape
from rankscope.shapes import Bool

TOKENS = 128
"""Tokens of a sample that are kept at most, from the first on; the plane is fitted to all."""
SCHEMA: dict[str, type[pl.DataType]] = {
    "variant": pl.String,
    "sample": pl.Int64,
    "layer": pl.Int64,
    "token": pl.Int64,
    "text": pl.String,
    "x": pl.Float64,
    "y": pl.Float64,
    "log10_scale": pl.Float64,
    "shown": pl.Float64,
}


def cloud(
    nets: Mapping[str, Transformer],
    X: Tensor,
    padding: Tensor | None = None,
    words: Sequence[Sequence[str]] | None = None,
    *,
    samples: int = 1,
    most: int = TOKENS,
) -> pl.DataFrame:
    """The cloud of the first `samples` samples in each of the networks (variants by name).

    `words` are the tokens of each sample as text (`net.words`); left out, their numbers.

    >>> from rankscope.nets import Architecture
    >>> net = Transformer.random(Architecture(layers=2, width=8, heads=2))
    >>> cloud({"transformer": net}, torch.randn(1, 5, 8)).height
    15
    """
    X, padding = X[:samples], None if padding is None else padding[:samples]
    found = {}
    for variant, net in nets.items():
        reader = ShapeReader(samples)
        one_pass(net, X, padding, [reader], batch=max(len(X), 1))
        found[variant] = reader.result()
    return cloud_table(found, real_tokens(X.shape[:-1], padding, X.device), words, most)


def cloud_table(
    found: Mapping[str, Sequence[Shape]],
    real: Bool[Tensor, "sample token"],
    words: Sequence[Sequence[str]] | None = None,
    most: int = TOKENS,
) -> pl.DataFrame:
    """The cloud of what a `ShapeReader` found in each variant; `real` says which tokens count."""
    every = [(variant, shape) for variant, shapes in found.items() for shape in shapes]
    frames = [pl.DataFrame(schema=SCHEMA)]
    for sample in range(len(real)) if every else []:
        here = real[sample].nonzero()[:, 0].cpu()
        texts = [str(token) for token in here.tolist()] if words is None else list(words[sample])
        frames.append(placed(every, sample, here, texts[:most]))
    return pl.concat(frames)


def placed(found: list[tuple[str, Shape]], sample: int, here: Tensor, texts: list[str]) -> pl.DataFrame:
    """One sample of these (variant, shape) in their common plane. `here` are the numbers of its tokens, and
    `texts` what the first of them read."""
    axes = _axes([shape for _, shape in found], sample)
    return pl.concat([_rows(shape, variant, sample, here, texts, axes) for variant, shape in found])


def _axes(found: list[Shape], sample: int) -> Tensor:
    """[width, 2]: the leading eigenvectors of the sum of all covariances. An axis has no direction of its
    own; its largest entry is positive, so that it does not follow the machine."""
    width = found[0].R.shape[-1]
    total = torch.zeros(width, width, dtype=torch.float64)
    for each in found:
        weight = 10.0 ** (2 * float(each.log10[sample].nan_to_num(-math.inf)))
        total += weight * each.R[sample].T @ each.R[sample]
    axes = torch.linalg.eigh(total).eigenvectors[:, -2:].flip(-1)
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    axes = torch.where(largest < 0, -axes, axes)
    return torch.nn.functional.pad(axes, (0, 2 - axes.shape[1]))


def _rows(
    shape: Shape, variant: str, sample: int, here: Tensor, texts: list[str], axes: Tensor
) -> pl.DataFrame:
    flat = shape.R[sample, here] @ axes
    points = flat[: len(texts)] * len(here) ** 0.5
    number = len(points)
    return pl.DataFrame(
        {
            "variant": [variant] * number,
            "sample": [sample] * number,
            "layer": [shape.layer] * number,
            "token": here[:number].tolist(),
            "text": texts[:number],
            "x": points[:, 0].tolist(),
            "y": points[:, 1].tolist(),
            "log10_scale": [float(shape.log10[sample])] * number,
            "shown": [float(flat.square().sum())] * number,
        },
        schema=SCHEMA,
    )

"""The tokens of every layer as points of a plane: one plane for all layers.

The command line and the explorer run a `ShapeReader` in a pass of theirs and call `cloud_table` or
`cloud_rows`; `cloud` runs the pass as well.

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

from rankscope.metrics import valid_tokens
from rankscope.nets import Transformer, padding_from
from rankscope.profiles.propagation import one_pass
from rankscope.profiles.readers import ShapeReader
from rankscope.profiles.steps import ResidualShape
from rankscope.shapes import Bool

TOKENS = 128  # tokens of a sample that are kept at most, from the first on; the plane is fitted to all
SCHEMA: dict[str, type[pl.DataType]] = {
    "variant": pl.String, "sample": pl.Int64, "layer": pl.Int64, "token": pl.Int64, "text": pl.String,
    "x": pl.Float64, "y": pl.Float64, "log10_scale": pl.Float64, "shown": pl.Float64,
}  # fmt: skip


def cloud(
    nets: Mapping[str, Transformer],
    X: Tensor,
    padding: Tensor | None = None,
    words: Sequence[Sequence[str]] | None = None,
    *,
    attention_mask: Tensor | None = None,
    samples: int = 1,
    most: int = TOKENS,
) -> pl.DataFrame:
    """The cloud of the first samples in each of several networks.

    Args:
        nets: Networks (variants) by name.
        X: Tokens `[batch, token, width]`.
        padding: `[batch, token]`, True at padded tokens.
        words: The tokens of each sample as text (`net.words`); left out, their indices.
        attention_mask: Instead of `padding`, 1 at tokens and 0 at padding.
        samples: How many samples are drawn.
        most: The most tokens of a sample that are kept.

    >>> from rankscope.nets import Architecture
    >>> net = Transformer.random(Architecture(layers=2, width=8, heads=2))
    >>> cloud({"transformer": net}, torch.randn(1, 5, 8)).height
    15
    """
    padding = padding_from(padding, attention_mask)
    X, padding = X[:samples], None if padding is None else padding[:samples]
    shapes = {}
    for variant, net in nets.items():
        reader = ShapeReader(samples)
        one_pass(net, X, padding, [reader], batch=max(len(X), 1))
        shapes[variant] = reader.result()
    return cloud_table(shapes, valid_tokens(X.shape[:-1], padding, X.device), words, most)


def cloud_table(
    shapes: Mapping[str, Sequence[ResidualShape]],
    valid: Bool[Tensor, "sample token"],
    words: Sequence[Sequence[str]] | None = None,
    most: int = TOKENS,
) -> pl.DataFrame:
    """The cloud (columns: see above) of the shapes that a `ShapeReader` kept of each variant. `valid` is False at
    padding; `words` has one text for each valid token of a sample. The first `most` tokens with a text get a row."""
    pairs = [(variant, shape) for variant, of_variant in shapes.items() for shape in of_variant]
    frames = [pl.DataFrame(schema=SCHEMA)]
    for sample in range(len(valid)) if pairs else []:
        tokens = valid[sample].nonzero()[:, 0].cpu()
        texts = [str(token) for token in tokens.tolist()] if words is None else list(words[sample])
        frames.append(cloud_rows(pairs, sample, tokens, texts[:most]))
    return pl.concat(frames)


def cloud_rows(shapes: list[tuple[str, ResidualShape]], sample: int, tokens: Tensor, texts: list[str]) -> pl.DataFrame:
    """One sample of these (variant, shape) in their common plane. `tokens` are the indices of its tokens, and
    `texts` what the first of them read."""
    axes = _axes([shape for _, shape in shapes], sample)
    return pl.concat([_rows(shape, variant, sample, tokens, texts, axes) for variant, shape in shapes])


def _axes(shapes: list[ResidualShape], sample: int) -> Tensor:
    """[width, 2]: the leading eigenvectors of the sum of all covariances. An axis has no direction of its
    own; its largest entry is positive, so that it does not follow the machine."""
    width = shapes[0].R.shape[-1]
    total = torch.zeros(width, width, dtype=torch.float64)
    for shape in shapes:
        weight = 10.0 ** (2 * float(shape.log10[sample].nan_to_num(-math.inf)))
        total += weight * shape.R[sample].T @ shape.R[sample]
    axes = torch.linalg.eigh(total).eigenvectors[:, -2:].flip(-1)
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    axes = torch.where(largest < 0, -axes, axes)
    return torch.nn.functional.pad(axes, (0, 2 - axes.shape[1]))


def _rows(
    shape: ResidualShape, variant: str, sample: int, tokens: Tensor, texts: list[str], axes: Tensor
) -> pl.DataFrame:
    flat = shape.R[sample, tokens] @ axes
    points = flat[: len(texts)] * len(tokens) ** 0.5
    count = len(points)
    names = ([value] * count for value in (variant, sample, shape.layer))
    sizes = ([value] * count for value in (float(shape.log10[sample]), float(flat.square().sum())))
    columns = (*names, tokens[:count].tolist(), texts[:count], *points.T.tolist(), *sizes)
    return pl.DataFrame(dict(zip(SCHEMA, columns, strict=True)), schema=SCHEMA)

"""The shape of the residual at every layer: tokens as points of one plane, and singular values, at any scale.

The command line and the explorer run a `ShapeReader` in a pass of theirs and call `cloud_table` or
`cloud_rows`, or a `SpectrumReader`, whose result is the table of spectra.

**Cloud.** The axes are the two leading principal directions of the residuals of all layers of all variants together, as
shares of their tokens' norm: where variants begin with the same tokens, they begin with the same picture. One
row per variant, sample, layer and token:

    variant · sample · layer · token · text · x · y · log10_scale · shown

x and y are in units of the layer's own spread (the root mean square over tokens of their distance from the
mean is one); times `10^log10_scale` they are in units of a token's own length (root mean square). `shown` is
the share of the layer's variance that lies in the plane.

**Spectra.** One row per variant, sample, layer and singular value of the residual:

    variant · sample · layer · index · log10

`log10` is that of the singular value over the tokens' norm, `sigma_k(res X) / |X|_F`; `index` counts from 1.
Values that lie below float64's rounding of the largest are noise, and left out.
"""

import math
from collections.abc import Mapping, Sequence

import polars as pl
import torch
from torch import Tensor

from rankscope.metrics import Of
from rankscope.profiles.readers import LayerStep, ResidualShape, sampled_layers
from rankscope.shapes import Bool

TOKENS = 128  # tokens of a sample that are kept at most, from the first on; the plane is fitted to all
MOST = 64  # singular values kept of each layer, the largest
CLOUD: dict[str, type[pl.DataType]] = {
    "variant": pl.String, "sample": pl.Int64, "layer": pl.Int64, "token": pl.Int64, "text": pl.String,
    "x": pl.Float64, "y": pl.Float64, "log10_scale": pl.Float64, "shown": pl.Float64,
}  # fmt: skip
SPECTRUM: dict[str, type[pl.DataType]] = {
    "variant": pl.String, "sample": pl.Int64, "layer": pl.Int64, "index": pl.Int64, "log10": pl.Float64,
}  # fmt: skip


class _FirstSamples:
    """A reader of the residual of the first samples, at `sampled_layers` layers."""

    needs: frozenset[Of] = frozenset(("tokens",))
    samples: int

    def _residual(self, step: LayerStep) -> ResidualShape | None:
        """The residual of those of its samples that a batch holds; None if there are none, or the layer is left out."""
        count = self.samples - step.start
        if count <= 0 or step.layer not in sampled_layers(step.net.arch.layers):
            return None
        layer, R, log10 = step.residual
        return ResidualShape(layer, R[:count], log10[:count])


class ShapeReader(_FirstSamples):
    """The residual of the first samples as a shape and a scale: for the cloud."""

    cost = "a norm at each layer; keeps the first samples' tokens of up to 33 layers"

    def __init__(self, samples: int = 1) -> None:
        self.samples = samples
        self._shapes: list[ResidualShape] = []

    def read(self, step: LayerStep) -> None:
        """Keep the residual, on the CPU."""
        if (shape := self._residual(step)) is not None:
            self._shapes.append(shape._replace(R=shape.R.cpu().nan_to_num(0.0)))

    def result(self) -> list[ResidualShape]:
        """Shapes by layer, all samples of a layer together."""
        layers = dict.fromkeys(shape.layer for shape in self._shapes)
        parts = [[shape for shape in self._shapes if shape.layer == layer] for layer in layers]
        joined = [(torch.cat([s.R for s in part]), torch.cat([s.log10 for s in part])) for part in parts]
        return [ResidualShape(layer, *shape) for layer, shape in zip(layers, joined, strict=True)]


def cloud_table(
    shapes: Mapping[str, Sequence[ResidualShape]],
    valid: Bool[Tensor, "sample token"],
    words: Sequence[Sequence[str]] | None = None,
    most: int = TOKENS,
) -> pl.DataFrame:
    """The cloud (columns: see above) of the shapes that a `ShapeReader` kept of each variant. `valid` is False at
    padding; `words` has one text for each valid token of a sample. The first `most` tokens with a text get a row."""
    pairs = [(variant, shape) for variant, of_variant in shapes.items() for shape in of_variant]
    frames = [pl.DataFrame(schema=CLOUD)]
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
    return pl.DataFrame(dict(zip(CLOUD, columns, strict=True)), schema=CLOUD)


class SpectrumReader(_FirstSamples):
    """Singular values of the residual of the first samples."""

    cost = "singular values of the first samples at up to 33 layers; keeps these"

    def __init__(self, variant: str, samples: int = 4, most: int = MOST) -> None:
        self.variant, self.samples, self.most = variant, samples, most
        self._frames = [pl.DataFrame(schema=SPECTRUM)]

    def read(self, step: LayerStep) -> None:
        """Take the singular values where the tokens are."""
        if (shape := self._residual(step)) is None:
            return
        R, log10 = shape.R, shape.log10
        values = torch.linalg.svdvals(R.nan_to_num(0.0)).cpu()[:, : self.most]
        least = values[:, :1] * max(R.shape[1:]) * torch.finfo(torch.float64).eps
        kept = (values > least) & log10.isfinite()[:, None]
        sample, index = kept.nonzero(as_tuple=True)
        logs = values[kept].log10() + log10[sample]
        layer, variant = [step.layer] * len(logs), [self.variant] * len(logs)
        columns = (variant, (step.start + sample).tolist(), layer, (index + 1).tolist(), logs.tolist())
        self._frames.append(pl.DataFrame(dict(zip(SPECTRUM, columns, strict=True)), schema=SPECTRUM))

    def result(self) -> pl.DataFrame:
        """The singular values of this variant."""
        return pl.concat(self._frames)

"""Singular values of the residual by layer, at any scale. One row per variant, sample, layer and value:

    variant · sample · layer · index · log10

`log10` is that of the singular value over the tokens' norm, `sigma_k(res X) / |X|_F`; `index` counts from 1.
Values that lie below float64's rounding of the largest are noise, and left out. The command line runs a
`SpectrumReader` in a pass of its own; `spectra` runs the pass as well.
"""

from collections.abc import Mapping

import polars as pl
import torch
from torch import Tensor

from rankscope.metrics import Of
from rankscope.nets import Transformer, padding_from
from rankscope.profiles.propagation import one_pass
from rankscope.profiles.steps import LayerStep, sampled_layers

MOST = 64  # singular values kept of each layer, the largest
SCHEMA: dict[str, type[pl.DataType]] = {
    "variant": pl.String, "sample": pl.Int64, "layer": pl.Int64, "index": pl.Int64, "log10": pl.Float64,
}  # fmt: skip


def spectra(
    nets: Mapping[str, Transformer],
    X: Tensor,
    padding: Tensor | None = None,
    *,
    attention_mask: Tensor | None = None,
    samples: int = 4,
    most: int = MOST,
) -> pl.DataFrame:
    """Singular values of the residual of the first samples in each of several networks.

    Args:
        nets: Networks (variants) by name.
        X: Tokens `[batch, token, width]`.
        padding: `[batch, token]`, True at padded tokens.
        attention_mask: Instead of `padding`, 1 at tokens and 0 at padding.
        samples: How many samples are read.
        most: The most singular values of a layer, the largest.

    Returns:
        A row for each value: `log10` is of the value over the tokens' norm, `index` counts from 1 at each layer. Values
        below float64's rounding of the largest are left out; of a network deeper than 32 layers 33 are read, evenly.

    >>> from rankscope.nets import Architecture
    >>> net = Transformer.random(Architecture(layers=2, width=8, heads=2))
    >>> spectra({"transformer": net}, torch.randn(1, 5, 8)).group_by("layer").len()["len"].to_list()
    [4, 4, 4]
    """
    padding = padding_from(padding, attention_mask)
    X, padding = X[:samples], None if padding is None else padding[:samples]
    frames = []
    for variant, net in nets.items():
        reader = SpectrumReader(variant, samples, most)
        one_pass(net, X, padding, [reader], batch=max(len(X), 1))
        frames.append(reader.result())
    return pl.concat([pl.DataFrame(schema=SCHEMA), *frames])


class SpectrumReader:
    """Singular values of the residual of the first samples, at `sampled_layers` layers."""

    needs: frozenset[Of] = frozenset(("tokens",))
    cost = "singular values of the first samples at up to 33 layers; keeps these"

    def __init__(self, variant: str, samples: int = 4, most: int = MOST) -> None:
        self.variant, self.samples, self.most = variant, samples, most
        self._frames = [pl.DataFrame(schema=SCHEMA)]

    def read(self, step: LayerStep) -> None:
        """Take the singular values where the tokens are."""
        count = self.samples - step.start
        if count <= 0 or step.layer not in sampled_layers(step.net.arch.layers):
            return
        R, log10 = step.residual.R[:count], step.residual.log10[:count]
        values = torch.linalg.svdvals(R.nan_to_num(0.0)).cpu()[:, : self.most]
        least = values[:, :1] * max(R.shape[1:]) * torch.finfo(torch.float64).eps
        kept = (values > least) & log10.isfinite()[:, None]
        sample, index = kept.nonzero(as_tuple=True)
        logs = values[kept].log10() + log10[sample]
        layer, variant = [step.layer] * len(logs), [self.variant] * len(logs)
        columns = (variant, (step.start + sample).tolist(), layer, (index + 1).tolist(), logs.tolist())
        self._frames.append(pl.DataFrame(dict(zip(SCHEMA, columns, strict=True)), schema=SCHEMA))

    def result(self) -> pl.DataFrame:
        """The singular values of this variant, as `spectra` has them."""
        return pl.concat(self._frames)

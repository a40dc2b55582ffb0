"""Singular values of the residual by layer, at any scale. One row per variant, sample, layer and value:

    variant · sample · layer · index · log10

`log10` is that of the singular value over the tokens' norm, `sigma_k(res X) / |X|_F`; `index` counts from 1.
Values that lie below float64's rounding of the largest are noise, and left out.
"""

from collections.abc import Mapping

import polars as pl
import torch
from torch import Tensor

from rankscope.metrics.metric import Of
from rankscope.nets import Transformer
from rankscope.profiles.propagation import one_pass
from rankscope.profiles.shapes import explored
from rankscope.profiles.steps import LayerStep

MOST = 64
"""Singular values kept of each layer, the largest."""
SCHEMA: dict[str, type[pl.DataType]] = {
    "variant": pl.String,
    "sample": pl.Int64,
    "layer": pl.Int64,
    "index": pl.Int64,
    "log10": pl.Float64,
}


def spectra(
    nets: Mapping[str, Transformer],
    X: Tensor,
    padding: Tensor | None = None,
    *,
    samples: int = 4,
    most: int = MOST,
) -> pl.DataFrame:
    """Of the first `samples` samples in each of the networks (variants by name).

    >>> from rankscope.nets import Architecture
    >>> net = Transformer.random(Architecture(layers=2, width=8, heads=2))
    >>> spectra({"transformer": net}, torch.randn(1, 5, 8)).group_by("layer").len()["len"].to_list()
    [4, 4, 4]
    """
    X, padding = X[:samples], None if padding is None else padding[:samples]
    frames = []
    for variant, net in nets.items():
        reader = SpectrumReader(variant, samples, most)
        one_pass(net, X, padding, [reader], batch=max(len(X), 1))
        frames.append(reader.result())
    return pl.concat([pl.DataFrame(schema=SCHEMA), *frames])


class SpectrumReader:
    """Singular values of the residual of the first samples, at `looked_at` layers."""

    needs: frozenset[Of] = frozenset(("tokens",))
    cost = "singular values of the first samples at up to 33 layers; keeps these"

    def __init__(self, variant: str, samples: int = 4, most: int = MOST) -> None:
        self.variant, self.samples, self.most = variant, samples, most
        self._found = [pl.DataFrame(schema=SCHEMA)]

    def read(self, step: LayerStep) -> None:
        """Take the singular values where the tokens are."""
        number = self.samples - step.start
        if number <= 0 or step.layer not in explored(step.net.arch.layers):
            return
        R, log10 = step.residual.R[:number], step.residual.log10[:number]
        values = torch.linalg.svdvals(R.nan_to_num(0.0)).cpu()[:, : self.most]
        least = values[:, :1] * max(R.shape[1:]) * torch.finfo(torch.float64).eps
        there = (values > least) & log10.isfinite()[:, None]
        sample, index = there.nonzero(as_tuple=True)
        logs = values[there].log10() + log10[sample]
        columns = {
            "variant": [self.variant] * len(logs),
            "sample": (step.start + sample).tolist(),
            "layer": [step.layer] * len(logs),
            "index": (index + 1).tolist(),
            "log10": logs.tolist(),
        }
        self._found.append(pl.DataFrame(columns, schema=SCHEMA))

    def result(self) -> pl.DataFrame:
        """As `spectra` has them, of this variant."""
        return pl.concat(self._found)

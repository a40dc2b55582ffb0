"""Singular values of the residual by layer, at any scale. One row per variant, sample, layer and value:

    variant · sample · layer · index · log10

`log10` is that of the singular value over the tokens' norm, `sigma_k(res X) / |X|_F`; `index` counts from 1.
Values that lie below float64's rounding of the largest are noise, and left out.
"""

from collections.abc import Mapping

import polars as pl
import torch
from torch import Tensor

from rankscope.nets import Transformer
from rankscope.profiles.shapes import shapes

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
    frames = [pl.DataFrame(schema=SCHEMA)]
    for variant, net in nets.items():
        for each in shapes(net, X, padding):
            values = torch.linalg.svdvals(each.R.nan_to_num(0.0)).cpu()[:, :most]
            least = values[:, :1] * max(each.R.shape[1:]) * torch.finfo(torch.float64).eps
            there = (values > least) & each.log10.isfinite()[:, None]
            sample, index = there.nonzero(as_tuple=True)
            logs = values[there].log10() + each.log10[sample]
            frames.append(
                pl.DataFrame(
                    {
                        "variant": [variant] * len(logs),
                        "sample": sample.tolist(),
                        "layer": [each.layer] * len(logs),
                        "index": (index + 1).tolist(),
                        "log10": logs.tolist(),
                    },
                    schema=SCHEMA,
                )
            )
    return pl.concat(frames)

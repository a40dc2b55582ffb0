"""A network, padded tokens, and the residuals of its layers, for tests of what readers show."""

from collections.abc import Mapping, Sequence

import polars as pl
import torch

from rankscope.nets import Architecture, Transformer
from rankscope.profiles import ResidualShape, ShapeReader, SpectrumReader, cloud_table, one_pass

NET = Transformer.random(Architecture(layers=4, width=16, heads=2), init="xavier")
X = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
PADDING = torch.zeros(2, 9, dtype=torch.bool)
PADDING[1, 6:] = True


def shapes(net: Transformer, X: torch.Tensor, padding: torch.Tensor | None = None) -> list[ResidualShape]:
    reader = ShapeReader(len(X))
    one_pass(net, X, padding, [reader], batch_size=1)
    return reader.result()


def cloud(
    nets: Mapping[str, Transformer],
    X: torch.Tensor,
    padding: torch.Tensor | None = None,
    words: Sequence[Sequence[str]] | None = None,
    samples: int = 1,
    most: int = 128,
) -> pl.DataFrame:
    X, padding = X[:samples], torch.zeros(X.shape[:-1], dtype=torch.bool) if padding is None else padding
    padding = padding[:samples]
    found = {}
    for variant, net in nets.items():
        reader = ShapeReader(samples)
        one_pass(net, X, padding, [reader], batch_size=len(X))
        found[variant] = reader.result()
    return cloud_table(found, ~padding, words, most)


def spectra(nets: Mapping[str, Transformer], X: torch.Tensor, padding: torch.Tensor | None = None) -> pl.DataFrame:
    readers = {variant: SpectrumReader(variant) for variant in nets}
    for variant, net in nets.items():
        one_pass(net, X[:4], None if padding is None else padding[:4], [readers[variant]], batch_size=4)
    return pl.concat([reader.result() for reader in readers.values()])


def residual(state: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    return state[valid] - state[valid].mean(0)

"""A network, padded tokens, and the residuals of its layers, for tests of what readers show."""

import torch

from rankscope.nets import Architecture, Transformer
from rankscope.profiles import one_pass
from rankscope.profiles.cloud import ShapeReader
from rankscope.profiles.readers import ResidualShape

NET = Transformer.random(Architecture(layers=4, width=16, heads=2), init="xavier")
X = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
PADDING = torch.zeros(2, 9, dtype=torch.bool)
PADDING[1, 6:] = True


def shapes(net: Transformer, X: torch.Tensor, padding: torch.Tensor | None = None) -> list[ResidualShape]:
    reader = ShapeReader(len(X))
    one_pass(net, X, padding, [reader], batch=1)
    return reader.result()


def residual(state: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    return state[valid] - state[valid].mean(0)

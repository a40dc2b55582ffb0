"""A small encoder that learns, for processes of their own: torch alone is imported quickly."""

import torch
from torch import Tensor, nn


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).double()


def tokens(step: int, samples: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(samples, 6, 16, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, X: Tensor) -> Tensor:
    """Each token is to become the one before it."""
    return (model(X)[:, 1:] - X[:, :-1]).square().mean()

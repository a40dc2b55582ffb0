"""Metrics written down once more, sample by sample, in numpy: what the watched values are held against."""

import numpy as np
import torch
from torch import Tensor


def _samples(X: Tensor, real: Tensor) -> list[np.ndarray]:
    """The real tokens of each sample."""
    return [tokens[kept] for tokens, kept in zip(X.detach().double().numpy(), real.numpy(), strict=True)]


def mu(X: Tensor, real: Tensor) -> Tensor:
    """||X - mean||_F of each sample's real tokens."""
    found = [np.sqrt(((Y - Y.mean(0)) ** 2).sum()) for Y in _samples(X, real)]
    return torch.tensor(found, dtype=torch.float64)


def relative_residual(X: Tensor, real: Tensor) -> Tensor:
    """Dong's composite norm of the residual over that of the tokens."""

    def composite(A: np.ndarray) -> float:
        return float(np.sqrt(np.abs(A).sum(0).max() * np.abs(A).sum(1).max()))

    found = [composite(Y - Y.mean(0)) / composite(Y) for Y in _samples(X, real)]
    return torch.tensor(found, dtype=torch.float64)


def dobrushin(P: Tensor, real: Tensor) -> Tensor:
    """The largest total variation between two real rows, of each sample and head."""
    found = []
    for heads, kept in zip(P.double().numpy(), real.numpy(), strict=True):
        rows = heads[:, kept][:, :, kept]
        found.append((np.abs(rows[:, :, None] - rows[:, None]).sum(-1) / 2).max((1, 2)))
    return torch.tensor(np.stack(found), dtype=torch.float64)

"""Metrics written down once more, sample by sample, in numpy: what the watched values are held against."""

import numpy as np
from torch import Tensor


def mu(X: Tensor, real: Tensor) -> list[float]:
    """||X - mean||_F of each sample's real tokens."""
    found = []
    for tokens, kept in zip(X.double().numpy(), real.numpy(), strict=True):
        there = tokens[kept]
        found.append(float(np.sqrt(((there - there.mean(0)) ** 2).sum())))
    return found


def relative_residual(X: Tensor, real: Tensor) -> list[float]:
    """Dong's composite norm of the residual over that of the tokens."""

    def composite(A: np.ndarray) -> float:
        return float(np.sqrt(np.abs(A).sum(0).max() * np.abs(A).sum(1).max()))

    found = []
    for tokens, kept in zip(X.double().numpy(), real.numpy(), strict=True):
        there = tokens[kept]
        found.append(composite(there - there.mean(0)) / composite(there))
    return found


def dobrushin(P: Tensor, real: Tensor) -> list[list[float]]:
    """The largest total variation between two real rows, of each sample and head."""
    found = []
    for heads, kept in zip(P.double().numpy(), real.numpy(), strict=True):
        rows = heads[:, kept][:, :, kept]
        gaps = np.abs(rows[:, :, None] - rows[:, None]).sum(-1) / 2
        found.append([float(gap.max()) for gap in gaps])
    return found

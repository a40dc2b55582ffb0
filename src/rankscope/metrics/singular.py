"""The two largest singular values of a large matrix that is only multiplied with: block bidiagonalisation
(Golub, Kahan 1965) with full reorthogonalisation.

From orthonormal columns Q, `P Q = U B` and `P^T U = Q B^T + Q' R`. A singular triple (s, u, v) of B gives
`P v = s u` and misses `P^T u = s v` by the **residual** `|R u|` of its last block: P has a singular value
within that of s, and s errs by about the square of it over the gap to the next. Values are given where the
residuals are below `RESIDUAL` of them (and of rounding); else NaN.
"""

import torch
from torch import Tensor

from rankscope.metrics.rows import HeadRows, PatternRows
from rankscope.shapes import Float

RESIDUAL = 1e-8
TOGETHER = 16
"""Columns of Q at a time."""
AT_MOST = 40
"""Times that Q grows."""
DENSE = 512
"""Rows, or columns, up to which P is taken as it is."""
ROUNDING = 16 * torch.finfo(torch.float64).eps


def second_by_head(P: PatternRows) -> Float[Tensor, "batch head"]:
    """The second singular value s_2 of every head."""
    return P.map_heads(lambda head: two_largest(head)[1])


def gap_by_head(P: PatternRows) -> Float[Tensor, "batch head"]:
    """s_1 - s_2 of every head."""

    def gap(head: HeadRows) -> Tensor:
        first, second = two_largest(head)
        return first - second

    return P.map_heads(gap)


def two_largest(P: HeadRows) -> Float[Tensor, "2"]:
    """s_1 and s_2 of one head; s_2 of one row is 0."""
    if len(P) <= DENSE:
        matrix = torch.cat([block for _, block in P.blocks()])
        if not bool(matrix.isfinite().all()):
            return matrix.new_full((2,), torch.nan)
        return torch.cat([torch.linalg.svdvals(matrix), matrix.new_zeros(2)])[:2]
    first = P.rows(0, 1)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(first.shape[-1], TOGETHER, generator=generator, dtype=torch.float64).to(first.device)
    start[:, 0] = 1.0  # what a matrix whose rows sum to one keeps
    Q, _, _ = _added(start, start[:, :0])
    Qs, Us, B = Q, first.new_zeros(len(P), 0), first.new_zeros(0, 0)
    for _ in range(min(AT_MOST, len(P) // TOGETHER - 1)):
        Y = torch.cat([block @ Q for _, block in P.blocks()])
        U, known, new = _added(Y, Us)
        B = torch.cat([torch.nn.functional.pad(B, (0, 0, 0, TOGETHER)), torch.cat([known, new])], 1)
        Us = torch.cat([Us, U], 1)
        Z = sum(block.mT @ U[at : at + len(block)] for at, block in P.blocks())
        assert isinstance(Z, Tensor)
        if not bool(Z.isfinite().all()):
            break
        Q, _, R = _added(Z, Qs)
        Qs = torch.cat([Qs, Q], 1)
        left, s, _ = torch.linalg.svd(B)
        residual = torch.linalg.vector_norm(R @ left[-TOGETHER:, :2], dim=0)
        if bool((residual <= RESIDUAL * s[:2] + ROUNDING * s[0]).all()):
            return s[:2]
    return first.new_full((2,), torch.nan)


def _added(X: Tensor, known: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(new, of_known, of_new) with `X = known @ of_known + new @ of_new`, the columns of both orthonormal."""
    of_known = known.mT @ X
    rest = X - known @ of_known
    new, R = torch.linalg.qr(rest)
    gone = R.diagonal().abs() <= 1e-12 * torch.linalg.vector_norm(X, dim=0)  # X has fewer directions
    generator = torch.Generator().manual_seed(known.shape[1])
    random = torch.randn(new.shape, generator=generator, dtype=new.dtype).to(new.device)
    new = torch.where(gone, random / len(X) ** 0.5, new)
    for _ in range(2):  # what rounding left of the known ones
        new, _ = torch.linalg.qr(new - known @ (known.mT @ new))
    return new, of_known, new.mT @ X

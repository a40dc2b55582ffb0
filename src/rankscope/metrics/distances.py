"""The largest distance between two rows: of attention patterns in the 1-norm, of tokens in the 2-norm.

`attention.py` and `theory/attention_numbers.py` make Dobrushin's coefficient of the first, `cosine.py` and the diameter
of `theory/readings.py` are the second. Only the largest distance of each matrix is returned, so neither holds the
distances of all pairs where that can be avoided: on a GPU `distances_triton.py` compares rows where it reads them.
"""

import torch
from torch import Tensor

from rankscope.metrics.token_norms import on_gpu
from rankscope.shapes import Bool, Float

AT_ONCE = 2**26  # Bytes of products of rows that are held at once


def largest_sum_distance(
    P: Float[Tensor, "*batch row column"], valid: Bool[Tensor, "*batch row"] | None = None
) -> Float[Tensor, "*batch"]:
    """The largest `sum_k |P_ik - P_jk|` of two rows of each matrix, NaN of a matrix that holds NaN.

    Args:
        P: Matrices of one row at least.
        valid: True at rows that count; None if all do.
    """
    if P.dtype == torch.float64 and on_gpu(P):
        from rankscope.metrics.distances_triton import fused_sum_distance

        return fused_sum_distance(P, valid)
    distance = torch.cdist(P, P, p=1.0)
    if valid is not None:
        distance = distance.masked_fill(~(valid[..., :, None] & valid[..., None, :]), 0.0)
    return distance.amax((-2, -1))


def largest_square_distance(R: Float[Tensor, "*batch row column"], at_once: int = AT_ONCE) -> Float[Tensor, "*batch"]:
    """The largest `|r_i - r_j|^2` of two rows of each matrix, as `|r_i|^2 + |r_j|^2 - 2 <r_i, r_j>`.

    That formula loses what is small beside `|r_i|^2`, and distances of close rows with it, but not the largest distance
    if rows are written about a point between them: about their mean, or about one of them. Then no row is longer than
    the largest distance D (`r_i` is the mean of all `x_i - x_j`, or one of them), so each product is off by
    a few eps times the number of columns of D^2 at most, and the largest of all is D^2 to that share.

    Args:
        R: Rows about their mean or about one of them, of a size whose squares are in range; rows of zeros do not count.
        at_once: So many bytes of products are held at a time.
    """
    n = R.shape[-2]
    square = torch.linalg.vecdot(R, R)
    if not n:
        return square.sum(-1)
    step = max(1, at_once // max(1, 8 * square.numel()))
    largest = [
        (torch.sub(square[..., None, :], R[..., start : start + step, :] @ R.mT, alpha=2).amax(-1)
         + square[..., start : start + step]).amax(-1)
        for start in range(0, n, step)
    ]  # fmt: skip
    return torch.stack(largest).amax(0).clamp(min=0.0) if len(largest) > 1 else largest[0].clamp(min=0.0)

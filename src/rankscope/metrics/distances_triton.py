"""`largest_sum_distance` on a GPU: a kernel that compares blocks of rows with each other, and keeps the largest.

A program has two blocks of rows of one matrix, goes over their columns, and adds up `|P_ik - P_jk|` of all pairs of
rows in registers. Block b meets blocks b, b + 1, .. up to half the way round, so that all pairs of blocks meet. Every
sum is taken column by column in order, so that results are the same each time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 32  # of a block


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    P, VALID, LARGEST, p_matrix, p_row, p_column, n, columns, PADDED: tl.constexpr, ROWS: tl.constexpr
):
    """`LARGEST` [matrix, block, step]: the largest distance of a row of a block from one `step` blocks on."""
    matrix, block, step = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    blocks, steps = tl.num_programs(1), tl.num_programs(2)
    other = (block + step) % blocks
    # In the place of rows beyond the last one the last one, once more.
    left = tl.minimum(block * ROWS + tl.arange(0, ROWS), n - 1).to(tl.int64)
    right = tl.minimum(other * ROWS + tl.arange(0, ROWS), n - 1).to(tl.int64)
    at_left = P + matrix * p_matrix + left * p_row
    at_right = P + matrix * p_matrix + right * p_row
    distance = tl.zeros([ROWS, ROWS], tl.float64)
    for _ in range(0, columns):
        distance += tl.abs(tl.load(at_left)[:, None] - tl.load(at_right)[None, :])
        at_left += p_column
        at_right += p_column
    if PADDED:
        is_left = tl.load(VALID + matrix * n + left) != 0
        is_right = tl.load(VALID + matrix * n + right) != 0
        distance = tl.where(is_left[:, None] & is_right[None, :], distance, 0.0)
    known = distance == distance  # not NaN, which a maximum may lose
    largest = tl.max(tl.max(tl.where(known, distance, 0.0), 1), 0)
    unknown = tl.max(tl.max(tl.where(known, 0, 1), 1), 0)
    tl.store(LARGEST + (matrix * blocks + block) * steps + step, tl.where(unknown > 0, float("nan"), largest))


def fused_sum_distance(P: Tensor, valid: Tensor | None) -> Tensor:
    """The largest L1 distances `[*batch]` of two rows of matrices `[*batch, row, column]`, of rows that are valid."""
    batch, (n, columns) = P.shape[:-2], P.shape[-2:]
    mask = P if valid is None else valid.expand(P.shape[:-1]).contiguous().view(torch.uint8)
    P = P.reshape(-1, n, columns)
    blocks = triton.cdiv(n, ROWS)
    steps = blocks // 2 + 1
    largest = torch.empty(len(P), blocks * steps, dtype=P.dtype, device=P.device)
    with torch.cuda.device_of(P):  # type: ignore[no-untyped-call]
        _kernel[len(P), blocks, steps](
            P, mask, largest, *P.stride(), n, columns, PADDED=valid is not None, ROWS=ROWS, num_warps=4
        )
    return largest.amax(-1).view(batch)

"""Steps of deviation arithmetic that a GPU takes by one kernel in place of many small ones.

`Scaled.normalised` calls `rescaling`, `Scaled.__add__` calls `added` and `Perturbation.scaled` calls `moved_logs`. Each
layer takes dozens of these steps, and each of them computes a few numbers per sample or head by some ten operations:
kernels for these take longer to start than to run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ENTRIES = 2048  # entries that a program reads at once
LONG = 2**15  # entries of a row from which on one program is too slow for it, if there are few rows
FEW = 256  # rows by which a GPU is not busy
BITS = tl.constexpr(0x7FFFFFFFFFFFFFFF)  # of a float64 without its sign


@triton.jit  # type: ignore[untyped-decorator]
def _rescaling(  # type: ignore[no-untyped-def]
    VALUE, LOG, KEPT, MOVED, HALF, NEAR, rows, length, inner, log_outer, log_inner,
    widest: tl.constexpr, lowest: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of each row of values, of which `size` is the largest |entry|: the log of its scale as it is, the same with the
    log of the size in it, `1 / sqrt(size)`, and whether values may stay."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    # As integers, since there NaN is larger than infinity, and infinity than all numbers.
    most = tl.zeros([ROWS, COLUMNS], tl.int64)
    for start in range(0, length, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        is_entry = inside[:, None] & (column < length)[None, :]
        entry = tl.load(VALUE + row[:, None] * length + column[None, :], mask=is_entry, other=0.0)
        most = tl.maximum(most, entry.to(tl.int64, bitcast=True) & BITS)
    size = tl.max(most, 1).to(tl.float64, bitcast=True)
    log = tl.load(LOG + (row // inner) * log_outer + (row % inner) * log_inner, mask=inside, other=0.0)
    zero = size == 0
    step = tl.log(tl.where(zero, 1.0, size))
    step = tl.where(tl.abs(step) == float("inf"), float("nan"), step)
    tl.store(HALF + row, tl.exp(step * -0.5), mask=inside)
    tl.store(NEAR + row, (tl.abs(step) <= widest).to(tl.int8), mask=inside)
    moved = tl.where(zero, lowest, log + step)
    log = tl.where(zero, lowest, log)
    tl.store(MOVED + row, _within(moved, lowest), mask=inside)
    tl.store(KEPT + row, _within(log, lowest), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _within(log, lowest: tl.constexpr):  # type: ignore[no-untyped-def]
    """A log cut at `lowest` and at its negative; NaN stays NaN."""
    log = tl.where(log < lowest, lowest, log)
    return tl.where(log > -lowest, -lowest, log)


def rescaling(value: Tensor, log: Tensor, widest: float, lowest: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(the log as it is, the log with the size in it, `size^(-1/2)`, whether the log of the size is at most `widest`),
    where the size of a sample, or of a sample and head, is its largest |entry|.

    Args:
        value: Entries `[batch, ...]` or `[batch, head, ...]`, at least one of each.
        log: The log of their scale, `[batch]` or `[batch, head]`.
        widest: The log of a size up to which values may stay as they are.
        lowest: The log of zero.
    """
    rows, inner = log.numel(), log.shape[-1] if log.ndim > 1 else 1
    value = value.reshape(rows, -1)
    if value.shape[1] > LONG and rows < FEW:
        value = torch.linalg.vector_norm(value, ord=torch.inf, dim=1, keepdim=True)
    value, length = value.contiguous(), value.shape[1]
    columns = min(ENTRIES, triton.next_power_of_2(length))
    at_once = min(ENTRIES // columns, triton.next_power_of_2(max(1, rows // FEW)))
    kept, moved, half = (torch.empty(log.shape, dtype=log.dtype, device=log.device) for _ in range(3))
    near = torch.empty(log.shape, dtype=torch.int8, device=log.device)
    with torch.cuda.device_of(value):  # type: ignore[no-untyped-call]
        _rescaling[(triton.cdiv(rows, at_once),)](
            value, log, kept, moved, half, near, rows, length, inner, log.stride(0), log.stride(-1) * (log.ndim > 1),
            widest, lowest, ROWS=at_once, COLUMNS=columns,
        )  # fmt: skip
    return kept, moved, half, near.view(torch.bool)


@triton.jit  # type: ignore[untyped-decorator]
def _added(A, B, LOG_A, LOG_B, SUM, LOG, length, blocks, ENTRIES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some entries of the sum of one sample, and the larger log."""
    pid = tl.program_id(0).to(tl.int64)
    sample, block = pid // blocks, pid % blocks
    entry = block * ENTRIES + tl.arange(0, ENTRIES)
    log_a, log_b = tl.load(LOG_A + sample), tl.load(LOG_B + sample)
    log = tl.where(log_a > log_b, log_a, log_b)
    log = tl.where(log_a == log_a, log, log_a)  # NaN of a; that of b is there
    a = tl.load(A + sample * length + entry, mask=entry < length, other=0.0)
    b = tl.load(B + sample * length + entry, mask=entry < length, other=0.0)
    a = tl.where(log_a == log, a, a * tl.exp(log_a - log))  # e^0 is one also where the logs are infinite
    b = tl.where(log_b == log, b, b * tl.exp(log_b - log))
    tl.store(SUM + sample * length + entry, a + b, mask=entry < length)
    tl.store(LOG + sample, log, mask=block == 0)


def added(a: Tensor, b: Tensor, log_a: Tensor, log_b: Tensor) -> tuple[Tensor, Tensor]:
    """(the sum of `e^log_a a` and `e^log_b b` in units of e^log, log: the larger of the two).

    Args:
        a: Entries `[batch, ...]` or `[batch, head, ...]`, as many as of b.
        b: The other entries.
        log_a: The log of the scale of a, `[batch]` or `[batch, head]`.
        log_b: That of b.
    """
    a, b, log_a, log_b = (part.contiguous() for part in (a, b, log_a, log_b))
    total, log, rows = torch.empty_like(a), torch.empty_like(log_a), log_a.numel()
    length = a.numel() // rows
    entries = min(ENTRIES, triton.next_power_of_2(length))
    with torch.cuda.device_of(a):  # type: ignore[no-untyped-call]
        blocks = triton.cdiv(length, entries)
        _added[(rows * blocks,)](a, b, log_a, log_b, total, log, length, blocks, ENTRIES=entries)
    return total, log


@triton.jit  # type: ignore[untyped-decorator]
def _moved_logs(LOG, SHARE, MOVED, n, each, of_copy, share_row, size, lowest: tl.constexpr, ENTRIES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each log plus its share of itself, but the log of zero."""
    at = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    log = tl.load(LOG + at, mask=at < n, other=0.0)
    share = tl.load(SHARE + (at // of_copy) * share_row + at % each, mask=at < n, other=0.0)
    tl.store(MOVED + at, tl.where(log > lowest, log + log * (share * size), log), mask=at < n)


def moved_logs(log: Tensor, share: Tensor, size: float, lowest: float) -> Tensor:
    """The logs with each of them moved by a share of itself, but for the log of zero.

    Args:
        log: Logs `[batch]` or `[batch, head]`, of all samples and after them of all their copies.
        share: `[copy, number]`, what the logs of a sample are moved by: a row for samples, one for each copy.
        size: What shares are multiplied with.
        lowest: The log of zero, which stays.
    """
    log = log.contiguous()
    moved, n = torch.empty_like(log), log.numel()
    with torch.cuda.device_of(log):  # type: ignore[no-untyped-call]
        _moved_logs[(triton.cdiv(n, 256),)](
            log, share, moved, n, share.shape[1], n // len(share), share.stride(0), size, lowest, ENTRIES=256
        )
    return moved

"""Steps of deviation arithmetic that a GPU takes by one kernel in place of many small ones.

`Scaled.normalised` calls `rescaling` and `Scaled.__add__` calls `added`. Each layer takes dozens of these steps, and
each of them computes a few numbers per sample or head by some ten operations: kernels for these take longer to start
than to run.

`softmax.py` calls `gentle_rows` for rows of `P - 1 p^T`, where no score is far above the reference row's. Its formulas
are those of `ReferenceRow._gentle`; its second result answers the question of `ReferenceRow._far`, whether some row
needs other formulas. Every row of D is read once:

    U_ij = factor (D_ij - D_ij*),   x = size U,
    E_ij = expm1(x) / size, e^x / size or -1 / size, for columns seen by both rows, by row i alone, by the other alone,
    m_i = sum_j p_j E_ij,   Delta_ij = (E_ij - [j seen by the reference row] m_i) weight_j / (1 + size m_i).
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
    """(whether the log of the size is at most `widest`, the log as it is, the log with the size in it, `size^(-1/2)`),
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
    return near.view(torch.bool), kept, moved, half


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


ENTRIES_OF_ROWS = 1024  # entries of D that a program has, one row at least
INVERSE_LN_2 = tl.constexpr(1.4426950408889634)
LN_2_HIGH = tl.constexpr(0.6931471803691238)  # 32 bits, so that its products with k are exact
LN_2_LOW = tl.constexpr(1.9082149292705877e-10)
HIGHEST = tl.constexpr(709.0)  # e^x is finite up to here
LOWEST = tl.constexpr(-746.0)  # e^x is zero from here on


@triton.jit
def _exponentials(x):  # type: ignore[no-untyped-def]
    """(expm1(x), e^x) to two units in the last place; x is cut where e^x leaves float64's range.

    With x = k ln 2 + r and |r| <= ln(2) / 2, expm1(x) = 2^k expm1(r) + (2^k - 1), of which expm1(r) is summed as a
    series. Libraries differ from each other, and from the interpreter: this one is the same everywhere."""
    x = tl.where(x < LOWEST, LOWEST, x)
    x = tl.where(x > HIGHEST, HIGHEST, x)
    k = tl.floor(x * INVERSE_LN_2 + 0.5)
    r = (x - k * LN_2_HIGH) - k * LN_2_LOW
    s = 1.0 / 6227020800.0 + r * (1.0 / 87178291200.0)
    s = 1.0 / 479001600.0 + r * s
    s = 1.0 / 39916800.0 + r * s
    s = 1.0 / 3628800.0 + r * s
    s = 1.0 / 362880.0 + r * s
    s = 1.0 / 40320.0 + r * s
    s = 1.0 / 5040.0 + r * s
    s = 1.0 / 720.0 + r * s
    s = 1.0 / 120.0 + r * s
    s = 1.0 / 24.0 + r * s
    s = 1.0 / 6.0 + r * s
    s = 0.5 + r * s
    s = r + r * r * s
    k = k.to(tl.int64)
    half = k >> 1  # 2^k itself may be subnormal
    first = ((half + 1023) << 52).to(tl.float64, bitcast=True)
    second = ((k - half + 1023) << 52).to(tl.float64, bitcast=True)
    power = first * second
    return (s * first) * second + (power - 1.0), ((s + 1.0) * first) * second


@triton.jit  # type: ignore[untyped-decorator]
def _gentle_rows(  # type: ignore[no-untyped-def]
    D, VISIBLE, VALID, SEEN, P, LOG_W, WEIGHT, TOP, FACTOR, SIZE, CHANGE, FAR, far_from,
    d_batch, d_head, d_row, v_batch, v_row, v_token, heads, rows, n,
    ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """`ROWS` rows of one head; `P`, `LOG_W`, `WEIGHT` and `SEEN` are [batch, head, token], `VALID` is [batch, row]."""
    head, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch = head // heads
    row, column = block * ROWS + tl.arange(0, ROWS), tl.arange(0, TOKENS)
    is_row, is_column = row < rows, column < n
    inside = is_row[:, None] & is_column[None, :]
    top = tl.load(TOP + head)
    factor, size = tl.load(FACTOR + head), tl.load(SIZE + head)
    at = D + batch * d_batch + (head % heads) * d_head + row.to(tl.int64) * d_row
    d = tl.load(at[:, None] + column[None, :], mask=inside, other=0.0)
    at_top = tl.load(at + top, mask=is_row, other=0.0)
    seen_at = VISIBLE + batch * v_batch + row.to(tl.int64) * v_row
    visible = tl.load(seen_at[:, None] + column[None, :] * v_token, mask=inside, other=0) != 0
    top_visible = tl.load(seen_at + top * v_token, mask=is_row, other=0) != 0
    valid = tl.load(VALID + batch * rows + row, mask=is_row, other=0) != 0
    seen = (tl.load(SEEN + head * n + column, mask=is_column, other=0) != 0)[None, :]
    p = tl.load(P + head * n + column, mask=is_column, other=0.0)
    log_w = tl.load(LOG_W + head * n + column, mask=is_column, other=0.0)
    weight = tl.load(WEIGHT + head * n + column, mask=is_column, other=0.0)
    x = (d - at_top[:, None]) * factor * size
    x = tl.where(inside, x, 0.0)
    alone = visible & (seen == 0)
    high = tl.where(alone, tl.abs(log_w[None, :] + x), 0.0)
    far = (tl.max(tl.maximum(x, high), 1) > far_from) | (top_visible == 0)
    tl.store(FAR + head * tl.num_programs(1) + block, tl.max((far & valid).to(tl.int32), 0))
    grown, power = _exponentials(x)
    E = tl.where(visible, tl.where(seen, grown, power), tl.where(seen, -1.0, 0.0)) * (1.0 / size)
    m = tl.sum(p[None, :] * E, 1)
    per_row = 1.0 / (1.0 + size * m)
    change = (E - tl.where(seen, m[:, None], 0.0)) * weight[None, :] * per_row[:, None]
    change = tl.where(valid[:, None], change, 0.0)
    at = CHANGE + (head * rows + row) * n
    tl.store(at[:, None] + column[None, :], change, mask=inside)


def gentle_rows(
    D: Tensor,
    visible: Tensor,
    valid: Tensor,
    seen: Tensor,
    log_w: Tensor,
    log_others: Tensor,
    weight: Tensor,
    top: Tensor,
    factor: Tensor,
    size: Tensor,
    far: float,
) -> tuple[Tensor, Tensor]:
    """Rows of `P - 1 p^T` without column j*, and whether a valid row needs another formula.

    Args:
        D: What scores exceed those of the reference row by, `[batch, head, row, token]`, in units of e^log.
        visible: The columns visible to each row, `[batch, 1, row, token]`.
        valid: True at rows that are tokens, `[batch, row]`; the others are zero.
        seen: The columns visible to the reference row, `[batch, head, token]`.
        log_w: The log of p, also where the reference row does not see, `[batch, head, token]`.
        log_others: The same without column j*.
        weight: `e^log_others` in the units of the result.
        top: j*, `[batch, head]`.
        factor: By what D is multiplied to be in units of `size`, `[batch, head]`.
        size: The scale of the result, `[batch, head]`.
        far: What a score may exceed the reference row's by.

    Returns:
        The rows, and for blocks of rows `[batch * head, block]` whether in one of them j* is not seen or a score is
        farther off than `far`.
    """
    batch, heads, rows, n = D.shape
    D = D if D.stride(3) == 1 else D.contiguous()
    mask = visible.expand(batch, 1, rows, n).view(torch.uint8)
    block = max(1, min(triton.next_power_of_2(rows), ENTRIES_OF_ROWS // triton.next_power_of_2(n)))
    change = torch.empty(batch, heads, rows, n, dtype=D.dtype, device=D.device)
    blocks = triton.cdiv(rows, block)
    is_far = torch.empty(batch * heads, blocks, dtype=torch.int32, device=D.device)
    small = (seen, log_others.exp(), log_w, weight, top, factor, size)
    tensors = [t.contiguous() for t in (valid, *small)]
    tensors[:2] = [t.view(torch.uint8) for t in tensors[:2]]
    with torch.cuda.device_of(D):  # type: ignore[no-untyped-call]
        _gentle_rows[batch * heads, blocks](
            D, mask, *tensors, change, is_far, far, *D.stride()[:3], mask.stride(0), mask.stride(2), mask.stride(3),
            heads, rows, n, ROWS=block, TOKENS=triton.next_power_of_2(n), num_warps=4 if n <= 1024 else 16,
        )  # fmt: skip
    return change, is_far > 0

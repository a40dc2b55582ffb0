"""What `norms.py` computes, on a GPU: `token_norms` and `largest_sum_distance`.

**Norms**: a kernel that reads tokens from memory once, and a small one that combines its results. A program of the
first handles a **slab**: some columns of a sample, for all its tokens. It goes over the slab twice. First it takes
sums, largest and smallest entries of columns, and so the mean token m; then, of X and of R = X - 1 m^T, sums of
|entries| by row and column, and sums of squares. Of samples of at most `HELD` tokens a slab stays in registers between
the two, so that memory is read once. Of longer ones it is read again, and the slabs that run at the same time fit into
the GPU's cache, or nearly, where the second read finds them. Subtraction from the mean does not change the order of
entries, so the largest |R_ij| is known before they are squared, and squares are taken in units of it: they cannot leave
the range. The results of the slabs of a sample are then combined: sums of rows by torch, the others by `_finish`.

**Distances**: a kernel that compares blocks of rows with each other, and keeps the largest. A program has two blocks of
rows of one matrix, goes over their columns, and adds up `|P_ik - P_jk|` of all pairs of rows in registers. Block b
meets blocks b, b + 1, .. up to half the way round, so that all pairs of blocks meet. Every sum is taken column by
column in order, so that results are the same each time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

EXPONENT = tl.constexpr(0x7FF << 52)  # The bits of a float64 that hold its exponent
LEAST = tl.constexpr(1 << 52)  # 2^-1022
MOST = tl.constexpr(2045 << 52)  # 2^1022
BOTH = tl.constexpr(2046 << 52)  # The bits of p and of 1 / p add up to this, p a power of two

COLUMNS = 32  # of a slab that is read twice
ENTRIES = 1024  # entries of a slab that are read at once, where they are read twice
WARPS = 4
HELD = 256  # tokens of a sample up to which its slabs stay in registers
MOST_HELD = 2**11  # entries of a slab in registers, 16 columns of 128 tokens
EACH = 32  # of them, how many a thread holds
FEW = 256  # slabs by which a GPU is not busy: then they are made narrower
NARROWEST = 32  # bytes of a row of a slab
STAGES = 3  # blocks of entries that are under way at a time
ROWS = 32  # of a block of rows that is compared with others


@triton.jit
def _power_of_two(x):  # type: ignore[no-untyped-def]
    """(p, 1 / p), p the power of two of the size of x > 0, between 2^-1022 and 2^1022."""
    bits = tl.minimum(tl.maximum(x.to(tl.int64, bitcast=True) & EXPONENT, LEAST), MOST)
    return bits.to(tl.float64, bitcast=True), (-bits + BOTH).to(tl.float64, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _entries(place, row, x_row, n, is_column, is_row, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Entries of some rows of a slab in float64, zero in rows that do not count. They are asked for before it is known
    which rows those are."""
    inside = (row < n)[:, None] & is_column[None, :]
    x = tl.load(place[None, :] + row[:, None].to(tl.int64) * x_row, mask=inside, other=0.0)
    if x.dtype != tl.float64:
        x = x.to(tl.float32).to(tl.float64)
    if PADDED:
        x = tl.where(is_row[:, None], x, 0.0)
    return x


@triton.jit  # type: ignore[untyped-decorator]
def _counted(V, row, n, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """True for rows that are tokens; `V` points to the sample's mask."""
    is_row = row < n
    if PADDED:
        is_row = is_row & (tl.load(V + row, mask=is_row, other=0) != 0)
    return is_row


@triton.jit
def _sizes(x, mean, is_row, per_x, per_r):  # type: ignore[no-untyped-def]
    """(|x|, |r|, squares of x in units, squares of r in units) of entries and their residual r."""
    size_x, size_r = tl.abs(x), tl.abs(tl.where(is_row[:, None], x - mean[None, :], 0.0))
    in_units_x, in_units_r = size_x * per_x, size_r * per_r
    return size_x, size_r, in_units_x * in_units_x, in_units_r * in_units_r


@triton.jit
def _store_rows(at, size_x, size_r, row, n, all_slabs):  # type: ignore[no-untyped-def]
    """Store the sums of |entries| of rows."""
    tl.store(at + row, tl.sum(size_x, 1), mask=row < n)
    tl.store(at + row + all_slabs * n, tl.sum(size_r, 1), mask=row < n)


@triton.jit  # type: ignore[untyped-decorator]
def _slab(  # type: ignore[no-untyped-def]
    X, V, ROWS, NUMBERS, x_batch, x_row, n, d, slabs, all_slabs,
    PADDED: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr, HOLDS: tl.constexpr,
):  # fmt: skip
    """`ROWS` [2, batch, slab, token]: sums of |entries| of rows; `NUMBERS` [3, 2, batch, slab]: largest sum of
    |entries| of a column, sum of squares in units of the power of two of the largest entry, largest entry. With `HOLDS`
    all tokens are read at once and stay in registers."""
    pid = tl.program_id(0).to(tl.int64)
    sample, slab = pid // slabs, pid % slabs
    column = slab * WIDTH + tl.arange(0, WIDTH)
    is_column = column < d
    place, V, at_rows = X + sample * x_batch + column, V + sample * n, ROWS + pid * n
    infinity = float("inf")
    if HOLDS:
        row = tl.arange(0, TOKENS)
        is_row = _counted(V, row, n, PADDED)
        x = _entries(place, row, x_row, n, is_column, is_row, PADDED)
        tokens, total = tl.sum(tl.where(is_row, 1.0, 0.0).to(tl.float64), 0), tl.sum(x, 0)
        high = tl.max(tl.where(is_row[:, None], x, -infinity), 0)
        low = tl.min(tl.where(is_row[:, None], x, infinity), 0)
    else:
        count = tl.zeros([TOKENS], tl.float64)
        totals = tl.zeros([TOKENS, WIDTH], tl.float64)
        highest = tl.full([TOKENS, WIDTH], -infinity, tl.float64)
        lowest = tl.full([TOKENS, WIDTH], infinity, tl.float64)
        for start in tl.range(0, n, TOKENS, num_stages=STAGES):
            row = start + tl.arange(0, TOKENS)
            is_row = _counted(V, row, n, PADDED)
            x = _entries(place, row, x_row, n, is_column, is_row, PADDED)
            count += tl.where(is_row, 1.0, 0.0)
            totals += x
            highest = tl.maximum(highest, tl.where(is_row[:, None], x, -infinity))
            lowest = tl.minimum(lowest, tl.where(is_row[:, None], x, infinity))
        tokens, total = tl.sum(count, 0), tl.sum(totals, 0)
        high, low = tl.max(highest, 0), tl.min(lowest, 0)
    mean = total / tl.maximum(tokens, 1.0)
    high, low = tl.where(tokens > 0, high, 0.0), tl.where(tokens > 0, low, 0.0)
    largest_x = tl.max(tl.maximum(high, -low), 0)
    largest_r = tl.max(tl.maximum(high - mean, mean - low), 0)
    _, per_x = _power_of_two(largest_x)
    _, per_r = _power_of_two(largest_r)
    if HOLDS:
        size_x, size_r, square_x, square_r = _sizes(x, mean, is_row, per_x, per_r)
        _store_rows(at_rows, size_x, size_r, row, n, all_slabs)
        of_columns_x, of_columns_r = tl.sum(size_x, 0), tl.sum(size_r, 0)
        squares_x, squares_r = tl.sum(square_x, 0), tl.sum(square_r, 0)
    else:
        columns_x = tl.zeros([TOKENS, WIDTH], tl.float64)
        columns_r = tl.zeros([TOKENS, WIDTH], tl.float64)
        all_squares_x = tl.zeros([TOKENS, WIDTH], tl.float64)
        all_squares_r = tl.zeros([TOKENS, WIDTH], tl.float64)
        for start in tl.range(0, n, TOKENS, num_stages=STAGES):
            row = start + tl.arange(0, TOKENS)
            is_row = _counted(V, row, n, PADDED)
            x = _entries(place, row, x_row, n, is_column, is_row, PADDED)
            size_x, size_r, square_x, square_r = _sizes(x, mean, is_row, per_x, per_r)
            _store_rows(at_rows, size_x, size_r, row, n, all_slabs)
            columns_x += size_x
            columns_r += size_r
            all_squares_x += square_x
            all_squares_r += square_r
        of_columns_x, of_columns_r = tl.sum(columns_x, 0), tl.sum(columns_r, 0)
        squares_x, squares_r = tl.sum(all_squares_x, 0), tl.sum(all_squares_r, 0)
    at = NUMBERS + pid
    tl.store(at, tl.max(of_columns_x, 0))
    tl.store(at + all_slabs, tl.max(of_columns_r, 0))
    tl.store(at + 2 * all_slabs, tl.sum(squares_x, 0))
    tl.store(at + 3 * all_slabs, tl.sum(squares_r, 0))
    tl.store(at + 4 * all_slabs, largest_x)
    tl.store(at + 5 * all_slabs, largest_r)


@triton.jit  # type: ignore[untyped-decorator]
def _finish(NUMBERS, ROW, NORMS, batch, slabs, all_slabs, SLABS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The norms [3, 2, batch] of one sample, from `NUMBERS` of its slabs and the largest sum of a row, `ROW`
    [2, batch]; NaN where an entry of X is no number."""
    sample, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slab = tl.arange(0, SLABS)
    is_slab = slab < slabs
    at = NUMBERS + sample * slabs + slab
    of_x = tl.load(at + 2 * all_slabs, mask=is_slab, other=0.0)
    at += which * all_slabs
    column = tl.load(at, mask=is_slab, other=0.0)
    square = tl.load(at + 2 * all_slabs, mask=is_slab, other=0.0)
    largest = tl.load(at + 4 * all_slabs, mask=is_slab, other=0.0)
    unit, _ = _power_of_two(largest)
    most, per_most = _power_of_two(tl.max(largest, 0))
    share = unit * per_most
    frobenius = tl.sqrt(tl.sum(square * share * share, 0)) * most
    row = tl.load(ROW + which * batch + sample)
    composite = tl.sqrt(tl.max(column, 0)) * tl.sqrt(row)
    finite = tl.sum(tl.where(of_x < float("inf"), 0, 1), 0) == 0  # NaN is not below infinity
    nan = float("nan")
    at = NORMS + which * batch + sample
    tl.store(at, tl.where(finite, composite, nan))
    tl.store(at + 2 * batch, tl.where(finite, frobenius, nan))
    tl.store(at + 4 * batch, tl.where(finite, tl.max(largest, 0), nan))


def _shape(X: Tensor) -> tuple[int, int, int, bool]:
    """(columns of a slab, tokens that are read at once, warps, whether a slab stays in registers)."""
    batch, n, d = X.shape
    tokens, holds = triton.next_power_of_2(n), n <= HELD
    width = MOST_HELD // max(tokens, MOST_HELD // COLUMNS) if holds else COLUMNS
    while width * X.itemsize > NARROWEST and batch * triton.cdiv(d, width) < FEW:
        width //= 2
    if holds:
        return width, tokens, max(1, tokens * width // (32 * EACH)), True
    return width, min(tokens, ENTRIES // width), WARPS, False


def fused_token_norms(X: Tensor, valid: Tensor | None) -> Tensor:
    """The norms `[3, 2, batch]` of tokens `[batch, token, width]`, of which rows that are not valid are left out."""
    X = X if X.stride(2) == 1 else X.contiguous()
    batch, n, d = X.shape
    width, tokens, warps, holds = _shape(X)
    slabs = triton.cdiv(d, width)
    rows = torch.empty(2, batch, slabs, n, dtype=torch.float64, device=X.device)
    numbers = torch.empty(3, 2, batch, slabs, dtype=torch.float64, device=X.device)
    norms = torch.empty(3, 2, batch, dtype=torch.float64, device=X.device)
    mask = X if valid is None else valid.contiguous().view(torch.uint8)
    with torch.cuda.device_of(X):  # type: ignore[no-untyped-call]
        _slab[(batch * slabs,)](
            X, mask, rows, numbers, X.stride(0), X.stride(1), n, d, slabs, batch * slabs,
            PADDED=valid is not None, WIDTH=width, TOKENS=tokens, STAGES=STAGES, HOLDS=holds, num_warps=warps,
        )  # fmt: skip
        longest = rows.sum(2).amax(-1)
        _finish[(batch, 2)](
            numbers, longest, norms, batch, slabs, batch * slabs, SLABS=triton.next_power_of_2(slabs), num_warps=1
        )
    return norms


@triton.jit  # type: ignore[untyped-decorator]
def _distances(  # type: ignore[no-untyped-def]
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
        _distances[len(P), blocks, steps](
            P, mask, largest, *P.stride(), n, columns, PADDED=valid is not None, ROWS=ROWS, num_warps=4
        )
    return largest.amax(-1).view(batch)

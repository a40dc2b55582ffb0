"""`token_norms` on a GPU: one kernel that reads tokens twice, the second time from the GPU's cache where it can.

The tokens X of a sample are cut into **slabs** of columns, and a slab into **tiles** of rows. The kernel works on each
tile twice. Phase 1 sums x and |x| over the rows of the tile, for each column. The program that finishes the last tile
of a slab adds up the sums of its tiles: from then on the mean token m is known in this slab. Phase 2 reads the tile
again and takes everything that the norms of X and of R = X - 1 m^T need: sums of |entries| of rows and columns, sums of
squares, and the largest entries. The program that finishes the last tile of a slab, of some rows, or of a sample
combines the results; which one that is does not change the order in which numbers are added, so neither do results.

Programs take tickets as they start. Tickets name tiles in such an order that phase 2 of a tile follows phase 1 by
`lag` tiles: few enough that the cache still holds the tile, and enough that phase 1 of its slab is done, as a rule. A
program of phase 2 waits if it is not. It waits for lower tickets of phase 1 alone, and these wait for nobody.

Squares are taken of R alone, since ||X||_F^2 = ||R||_F^2 + n |m|^2 for n tokens; and in units of a power of two that is
about the sum of |x| of their column: they cannot leave the range. Those of narrower dtypes than float64 never do.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

EXPONENT = tl.constexpr(0x7FF << 52)  # The bits of a float64 that hold its exponent
LEAST = tl.constexpr(1 << 52)  # 2^-1022
MOST = tl.constexpr(2045 << 52)  # 2^1022
BOTH = tl.constexpr(2046 << 52)  # The bits of p and of 1 / p add up to this, p a power of two

LANE = 16  # bytes of a row that a thread reads at once
LANES = 32  # threads of a warp; together they read one row of a chunk of columns
SPAN = 256  # columns of a slab
TILE = 2**16  # bytes of a tile
WARPS = 4  # each reads a row of a tile, and has asked for its next two
REGISTERS = {8: 168, 4: 128, 2: 128}  # of a thread, by bytes of an entry: three programs at a time, or four
LAG = 320  # tiles that phase 1 is ahead of phase 2, beside those of a slab: more than half of what runs at a time
ADDED = 2048  # partial sums that are added up at once
GROUP = tl.constexpr(16)  # tiles of a slab whose sums are added up first, by the last of them


@triton.jit
def _power_of_two(x):  # type: ignore[no-untyped-def]
    """(p, 1 / p), p the power of two of the size of x > 0, between 2^-1022 and 2^1022."""
    bits = tl.minimum(tl.maximum(x.to(tl.int64, bitcast=True) & EXPONENT, LEAST), MOST)
    return bits.to(tl.float64, bitcast=True), (-bits + BOTH).to(tl.float64, bitcast=True)


@triton.jit
def _larger(a, b):  # type: ignore[no-untyped-def]
    """The entry of the larger size."""
    return tl.where(tl.abs(b) > tl.abs(a), b, a)


@triton.jit
def _frobenius(x):  # type: ignore[no-untyped-def]
    """The root of the sum of squares of entries x >= 0 of any size."""
    unit, per_unit = _power_of_two(tl.max(x))
    x *= per_unit
    return tl.sqrt(tl.sum(x * x)) * unit


@triton.jit
def _is_last(counter, of):  # type: ignore[no-untyped-def]
    """True in the last of some programs to come here; it sees what the others have stored."""
    tl.debug_barrier()  # the stores of all threads come before the count, which one thread takes
    return tl.atomic_add(counter, 1) == of - 1


@triton.jit  # type: ignore[untyped-decorator]
def _sum_of_blocks(at, blocks, stride, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of vectors of `WIDTH` numbers, of which there are `blocks`, each `stride` numbers after the last."""
    total = tl.zeros([AT_ONCE, WIDTH], tl.float64)
    for start in range(0, blocks, AT_ONCE):
        block = start + tl.arange(0, AT_ONCE)
        place = block.to(tl.int64)[:, None] * stride + tl.arange(0, WIDTH)[None, :]
        total += tl.load(at + place, mask=(block < blocks)[:, None], other=0.0)
    return tl.sum(total, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _is_last_of_slab(  # type: ignore[no-untyped-def]
    COLUMNS, groups_done, done, tile, tiles, STRIDE: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr
):
    """True in the last of a slab's programs. The first block of each `GROUP` of its tiles holds their sum by then."""
    group = tile // GROUP
    is_last = group < 0
    of_group = tl.minimum(GROUP, tiles - group * GROUP)
    if _is_last(groups_done + group, of_group):
        at = COLUMNS + group * (GROUP * STRIDE)
        sums = _sum_of_blocks(at, of_group, STRIDE, WIDTH, AT_ONCE)
        tl.debug_barrier()
        tl.store(at + tl.arange(0, WIDTH), sums)
        is_last = _is_last(done, tl.cdiv(tiles, GROUP))
    return is_last


@triton.jit  # type: ignore[untyped-decorator]
def _entries(place, V, row, x_row, n, is_column, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(Entries of some rows of a slab, which rows are tokens); entries of other rows are zero."""
    is_row = row < n
    if PADDED:
        is_row = is_row & (tl.load(V + row, mask=is_row, other=0) != 0)
    at = place + (row.to(tl.int64) * x_row)[:, None, None]
    x = tl.load(at, mask=is_row[:, None, None] & is_column, other=0.0)
    return x, is_row


@triton.jit  # type: ignore[untyped-decorator]
def _loaded(at, count, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    """`count` numbers, and zeros up to `MOST`."""
    index = tl.arange(0, MOST)
    return tl.load(at + index, mask=index < count, other=0.0)


@triton.jit
def _in_float64(x):  # type: ignore[no-untyped-def]
    """Entries in float64; Triton has no direct way from bfloat16."""
    return x if x.dtype == tl.float64 else x.to(tl.float32).to(tl.float64)


@triton.jit  # type: ignore[untyped-decorator]
def _columns_of_tile(  # type: ignore[no-untyped-def]
    place, V, first, end, x_row, is_column,
    PADDED: tl.constexpr, STEP: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Phase 1: sums of x and |x| of columns of a tile, [1, chunk, column] each; its largest |x|; its tokens."""
    total = tl.zeros([STEP, CHUNKS, WIDTH], tl.float64)
    size = tl.zeros([STEP, CHUNKS, WIDTH], tl.float64)
    largest = tl.zeros([STEP, CHUNKS, WIDTH], tl.float64)
    tokens = tl.zeros([STEP], tl.float64)
    row = tl.arange(0, STEP)
    x_1, is_token_1 = _entries(place, V, row + first, x_row, end, is_column, PADDED)
    x_2, is_token_2 = _entries(place, V, row + (first + STEP), x_row, end, is_column, PADDED)
    for start in range(first, end, STEP):
        x, is_token, x_1, is_token_1 = x_1, is_token_1, x_2, is_token_2
        x_2, is_token_2 = _entries(place, V, row + (start + 2 * STEP), x_row, end, is_column, PADDED)
        x = _in_float64(x)
        total += x
        size += tl.abs(x)
        largest = _larger(largest, x)
        tokens += tl.where(is_token, 1.0, 0.0)
    return tl.sum(total, 0)[None, :, :], tl.sum(size, 0)[None, :, :], tl.max(tl.abs(largest)), tl.sum(tokens, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _norms_of_tile(  # type: ignore[no-untyped-def]
    place, V, first, end, x_row, is_column, at_rows, mean, per_unit,
    PADDED: tl.constexpr, STEP: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Phase 2: sums of |r| and of its squares in units, of columns of a tile, [1, chunk, column] each; its largest |r|.
    The sums of |x| and |r| of its rows are stored."""
    size = tl.zeros([STEP, CHUNKS, WIDTH], tl.float64)
    squares = tl.zeros([STEP, CHUNKS, WIDTH], tl.float64)
    largest = tl.zeros([STEP, CHUNKS, WIDTH], tl.float64)
    row = tl.arange(0, STEP)
    x_1, is_token_1 = _entries(place, V, row + first, x_row, end, is_column, PADDED)
    x_2, is_token_2 = _entries(place, V, row + (first + STEP), x_row, end, is_column, PADDED)
    for start in range(first, end, STEP):
        x, is_token, x_1, is_token_1 = x_1, is_token_1, x_2, is_token_2
        x_2, is_token_2 = _entries(place, V, row + (start + 2 * STEP), x_row, end, is_column, PADDED)
        x = _in_float64(x)
        r = x - tl.where(is_token, 1.0, 0.0).to(tl.float64)[:, None, None] * mean
        sums = tl.join(tl.sum(tl.sum(tl.abs(x), 1), 1), tl.sum(tl.sum(tl.abs(r), 1), 1))
        tl.store(at_rows + 2 * (row + (start - first))[:, None] + tl.arange(0, 2)[None, :], sums)
        size += tl.abs(r)
        largest = _larger(largest, r)
        if place.dtype.element_ty == tl.float64:
            r *= per_unit
        squares += r * r
    return tl.sum(size, 0)[None, :, :], tl.sum(squares, 0)[None, :, :], tl.max(tl.abs(largest))


@triton.jit  # type: ignore[untyped-decorator]
def _finish(  # type: ignore[no-untyped-def]
    at_slabs, at_rows, NORMS, is_r, all_slabs, batch, slabs, tiles, next_rows, SLABS: tl.constexpr, TILES: tl.constexpr
):
    """Store the norms of X or of R of a sample; NaN where an entry of X is no number."""
    tile = tl.arange(0, TILES)
    row = tl.max(tl.load(at_rows + tile * next_rows, mask=tile < tiles, other=0.0), 0)
    column = tl.max(_loaded(at_slabs + is_r * all_slabs, slabs, SLABS), 0)
    frobenius = _frobenius(_loaded(at_slabs + (2 + is_r) * all_slabs, slabs, SLABS))
    largest = tl.max(_loaded(at_slabs + (4 + is_r) * all_slabs, slabs, SLABS), 0)
    of_x = _loaded(at_slabs + 2 * all_slabs, slabs, SLABS)
    infinite = tl.max(_loaded(at_slabs + 4 * all_slabs, slabs, SLABS), 0) == float("inf")
    broken = infinite | (tl.sum(tl.where(of_x == of_x, 0, 1), 0) > 0)
    NORMS += is_r * batch
    tl.store(NORMS, tl.where(broken, float("nan"), tl.sqrt(column) * tl.sqrt(row)))
    tl.store(NORMS + 2 * batch, tl.where(broken, float("nan"), frobenius))
    tl.store(NORMS + 4 * batch, tl.where(broken, float("nan"), largest))


@triton.jit  # type: ignore[untyped-decorator]
def _tile(  # type: ignore[no-untyped-def]
    X, V, COLUMNS, TOTALS, OF_ROWS, OF_TILES, OF_SLABS, COUNTS, NORMS, x_batch, x_row, batch, n, d, slabs, tiles, lag,
    PADDED: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    ADDED: tl.constexpr, SLABS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One tile in one phase, as the ticket says.

    Args:
        COLUMNS: [batch, slab, tile, 2, column]: of columns, sums of x and |x| by phase 1, then of |r| by phase 2.
        TOTALS: [batch, slab, 2, column]: sums of x and |x| of columns over all tiles.
        OF_ROWS: [batch, slab, tile, row, 2]: of rows, sums of |x| and |r|; then, at slab 0, their largest.
        OF_TILES: [4, batch, slab, tile]: valid tokens, largest |x|; Frobenius norm and largest entry of R.
        OF_SLABS: [6, batch, slab]: the largest sums of columns, Frobenius and max norm, each of X and of R.
        COUNTS: Zeros at first: the ticket; what is done of a slab in phase 1 and in 2, of rows, of a sample,
            and of a group of tiles in phase 1 and in 2.
        NORMS: [3, 2, batch], the result.
    """
    SPAN: tl.constexpr = CHUNKS * WIDTH  # columns of a slab
    all_slabs, items = batch * slabs, batch * slabs * tiles
    ticket = tl.atomic_add(COUNTS, 1)
    since = ticket - lag
    is_rest = ticket >= 2 * items - lag
    is_second = is_rest | ((since >= 0) & (since % 2 == 1))
    ahead = tl.where(since < 0, ticket, lag + since // 2)
    item = tl.where(is_second, tl.where(is_rest, ticket - items, since // 2), ahead)
    of_slab, tile = item // tiles, item % tiles
    sample, slab = of_slab // slabs, of_slab % slabs
    COUNTS += 1
    groups = tl.cdiv(tiles, GROUP)
    in_groups = COUNTS + 2 * all_slabs + batch * tiles + batch + of_slab * groups
    column = tl.arange(0, CHUNKS)[None, :, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    is_column = slab * SPAN + column < d
    place = X + sample.to(tl.int64) * x_batch + (slab * SPAN + column)
    V += sample.to(tl.int64) * n
    first = tile * ROWS
    end = tl.minimum(first + ROWS, n)
    COLUMNS += of_slab.to(tl.int64) * tiles * (2 * SPAN)
    at_columns = COLUMNS + tile * (2 * SPAN) + column
    TOTALS += of_slab.to(tl.int64) * (2 * SPAN)
    at_tiles = OF_TILES + of_slab * tiles
    if not is_second:
        total, size, largest, tokens = _columns_of_tile(
            place, V, first, end, x_row, is_column, PADDED, STEP, CHUNKS, WIDTH
        )
        tl.store(at_columns, total)
        tl.store(at_columns + SPAN, size)
        tl.store(at_tiles + tile, tokens)
        tl.store(at_tiles + tile + items, largest)
        if _is_last_of_slab(COLUMNS, in_groups, COUNTS + of_slab, tile, tiles, 2 * SPAN, 2 * SPAN, ADDED // (2 * SPAN)):
            sums = _sum_of_blocks(COLUMNS, groups, GROUP * 2 * SPAN, 2 * SPAN, ADDED // (2 * SPAN))
            tl.store(TOTALS + tl.arange(0, 2 * SPAN), sums)
            tl.debug_barrier()
            tl.atomic_add(COUNTS + of_slab, 1)
    else:
        while tl.atomic_add(COUNTS + of_slab, 0) <= groups:
            pass
        tokens = tl.maximum(tl.sum(_loaded(at_tiles, tiles, TILES), 0), 1.0)
        mean = tl.load(TOTALS + column) / tokens
        _, per_unit = _power_of_two(tl.load(TOTALS + SPAN + column))
        at_rows = OF_ROWS + item.to(tl.int64) * (2 * ROWS)
        size, squares, largest = _norms_of_tile(
            place, V, first, end, x_row, is_column, at_rows, mean, per_unit, PADDED, STEP, CHUNKS, WIDTH
        )
        tl.store(at_columns, size)
        sizes = tl.sqrt(squares)
        if X.dtype.element_ty == tl.float64:
            unit, _ = _power_of_two(tl.load(TOTALS + SPAN + column))
            sizes *= unit
        tl.store(at_tiles + tile + 2 * items, _frobenius(sizes))
        tl.store(at_tiles + tile + 3 * items, largest)
        done = 0
        at_rows = OF_ROWS + (sample * slabs).to(tl.int64) * tiles * (2 * ROWS)
        OF_SLABS += of_slab
        in_groups, all_done = in_groups + all_slabs * groups, COUNTS + all_slabs + of_slab
        if _is_last_of_slab(COLUMNS, in_groups, all_done, tile, tiles, 2 * SPAN, SPAN, ADDED // SPAN):
            sums = _sum_of_blocks(COLUMNS, groups, GROUP * 2 * SPAN, SPAN, ADDED // SPAN)
            tl.store(OF_SLABS, tl.max(_loaded(TOTALS + SPAN, SPAN, SPAN), 0))
            tl.store(OF_SLABS + all_slabs, tl.max(sums, 0))
            frobenius = _frobenius(_loaded(at_tiles + 2 * items, tiles, TILES))
            of_mean = _frobenius(tl.abs(_loaded(TOTALS, SPAN, SPAN) / tokens)) * tl.sqrt(tokens)
            tl.store(OF_SLABS + 2 * all_slabs, _frobenius(tl.join(of_mean, frobenius)))
            tl.store(OF_SLABS + 3 * all_slabs, frobenius)
            tl.store(OF_SLABS + 4 * all_slabs, tl.max(_loaded(at_tiles + items, tiles, TILES), 0))
            tl.store(OF_SLABS + 5 * all_slabs, tl.max(_loaded(at_tiles + 3 * items, tiles, TILES), 0))
            done += 1
        if _is_last(COUNTS + 2 * all_slabs + sample * tiles + tile, slabs):
            at = at_rows + tile * (2 * ROWS)
            of_rows = _sum_of_blocks(at, slabs, tiles * (2 * ROWS), 2 * ROWS, ADDED // (2 * ROWS))
            tl.debug_barrier()
            is_row = (first + tl.arange(0, ROWS) < n)[:, None]
            tl.store(at + tl.arange(0, 2), tl.max(tl.where(is_row, tl.reshape(of_rows, [ROWS, 2]), 0.0), 0))
            done += 1
        if done > 0:
            tl.debug_barrier()
            before = tl.atomic_add(COUNTS + 2 * all_slabs + batch * tiles + sample, done)
            if before + done == slabs + tiles:
                for is_r in range(2):
                    _finish(
                        OF_SLABS - slab, at_rows + is_r, NORMS + sample, is_r, all_slabs, batch, slabs, tiles,
                        2 * ROWS, SLABS, TILES,
                    )  # fmt: skip


def _shape(X: Tensor) -> tuple[int, int, int]:
    """(columns of a chunk, chunks of a slab, rows of a tile)."""
    _, n, d = X.shape
    width = min(LANE // X.itemsize * LANES, triton.next_power_of_2(d))
    chunks = max(1, min(SPAN, triton.next_power_of_2(d)) // width)
    return width, chunks, max(WARPS, min(TILE // (SPAN * X.itemsize), triton.next_power_of_2(n)))


def fused_token_norms(X: Tensor, valid: Tensor | None) -> Tensor:
    """The norms `[3, 2, batch]` of tokens `[batch, token, width]`, of which rows that are not valid are left out."""
    X = X if X.stride(2) == 1 else X.contiguous()
    batch, n, d = X.shape
    width, chunks, rows = _shape(X)
    span = width * chunks
    slabs, tiles = triton.cdiv(d, span), triton.cdiv(n, rows)
    items = batch * slabs * tiles
    sizes = [2 * items * span, 2 * batch * slabs * span, 2 * items * rows, 4 * items, 6 * batch * slabs]
    columns, totals, of_rows, of_tiles, of_slabs = torch.split(X.new_empty(sum(sizes), dtype=torch.float64), sizes)
    groups = triton.cdiv(tiles, GROUP.value)
    counts = torch.zeros(
        1 + 2 * batch * slabs * (1 + groups) + batch * tiles + batch, dtype=torch.int32, device=X.device
    )
    norms = torch.empty(3, 2, batch, dtype=torch.float64, device=X.device)
    mask = X if valid is None else valid.contiguous().view(torch.uint8)
    with torch.cuda.device_of(X):  # type: ignore[no-untyped-call]
        _tile[(2 * items,)](
            X, mask, columns, totals, of_rows, of_tiles, of_slabs, counts, norms, X.stride(0), X.stride(1),
            batch, n, d, slabs, tiles, min(items, tiles + LAG),
            PADDED=valid is not None, STEP=WARPS, CHUNKS=chunks, WIDTH=width, ROWS=rows, ADDED=ADDED,
            SLABS=triton.next_power_of_2(slabs), TILES=triton.next_power_of_2(tiles), num_warps=WARPS,
            maxnreg=REGISTERS[X.itemsize],
        )  # fmt: skip
    return norms

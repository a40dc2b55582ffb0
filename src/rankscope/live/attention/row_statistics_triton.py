"""`row_statistics` on a GPU: one kernel that goes over the keys of a block of queries and holds no scores in memory.

The numbers of a row are kept while its keys go by, as flash attention keeps its sums: with m the largest score so far,

    sum = sum_j e^{s_j - m},   weighted = sum_j e^{s_j - m} s_j,   squared = sum_j e^{2 (s_j - m)},

all of them are scaled when m grows. `row_statistics.py` calls `fused_row_statistics` for scores that `is_fused` takes.

Each score costs a handful of instructions, and these, not products of queries and keys, take the time. So exponentials
are powers of two, the scale is part of the exponent, hidden scores are `HIDDEN` instead of minus infinity (whose
differences would be NaN), keys that all queries of a block see are not compared with positions, and the first key is
looked for only in blocks that hold one.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rankscope.live.attention.scores import AttentionScores
from rankscope.metrics import RowStatistics

WIDEST = 256  # The widest heads that fit into the registers of a block
HIDDEN = tl.constexpr(-1e30)  # The score of a key that a query does not see
NONE = tl.constexpr(-1e29)  # The largest score of a query that sees a key is above this one
SMALLEST = 1e-9  # The smallest scale, by which `HIDDEN` is still below all scores
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


def is_fused(scores: AttentionScores) -> bool:
    """Whether the kernel makes these scores: on a GPU, without a function of the user's own, of heads not too wide."""
    fits = scores.query.shape[-1] <= WIDEST and scores.query.dtype != torch.float64 and scores.factor > SMALLEST
    return scores.query.is_cuda and scores.modified is None and fits


@triton.jit  # type: ignore[untyped-decorator]
def _add_keys(  # type: ignore[no-untyped-def]
    q, row, row_sequence, first, m, total, weighted, squared, at_first, begin, batch, head, lowest, highest,
    K, M, S, exponent, scale, softcap, offset, before, after, keys, group,
    k_batch, k_head, k_row, m_batch, m_head, m_row, m_key, s_batch, is_row,
    D: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr, PACKED: tl.constexpr, CAPPED: tl.constexpr,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, EXACT: tl.constexpr, KEYS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """The sums with one more block of keys; `ALL` where every query of the block sees all of them. A score is
    `exponent` times what is summed here, in powers of two."""
    column, d = begin + tl.arange(0, KEYS), tl.arange(0, WIDTH)
    at = K + batch * k_batch + (head // group) * k_head + column[None, :] * k_row + d[:, None]
    k = tl.load(at, mask=(column < keys)[None, :] & (d < D)[:, None], other=0.0)
    s = tl.dot(q, k, input_precision="ieee" if EXACT else "tf32")
    if CAPPED or MASK == 2:
        s = s * scale
    if CAPPED:
        x = s / softcap
        fall = tl.exp(-2.0 * tl.abs(x))
        s = softcap * tl.where(x < 0, -1.0, 1.0) * (1.0 - fall) / (1.0 + fall)
    if not ALL:
        is_key = column < keys
        seen = is_key[None, :] & is_row[:, None]
        ahead = column[None, :] - row[:, None] - offset
        if BEFORE:
            seen = seen & (ahead >= -before)
        if AFTER:
            seen = seen & (ahead <= after)
        if PACKED:
            key_sequence = tl.load(S + batch * s_batch + column, mask=is_key, other=-2)
            seen = seen & (row_sequence[:, None] == key_sequence[None, :])
        if MASK != 0:
            address = M + batch * m_batch + head * m_head + row[:, None] * m_row + column[None, :] * m_key
            mask = tl.load(address, mask=is_row[:, None] & is_key[None, :], other=0)
            if MASK == 1:
                seen = seen & (mask != 0)
            else:
                s = s + mask.to(tl.float32)
        s = tl.where(seen, s, HIDDEN if MASK != 2 else -float("inf"))
    larger = tl.maximum(m, tl.max(s, 1))
    if MASK == 2:  # masks add any number down to minus infinity: nothing finite stands for "hidden"
        base = tl.where(larger == -float("inf"), 0.0, larger)
        fall = tl.exp2((m - base) * exponent)
        e = tl.exp2((s - base[:, None]) * exponent)
        weighted = weighted * fall + tl.sum(tl.where(e > 0, e * s, 0.0), 1)
    else:
        base = tl.maximum(larger, NONE)  # `HIDDEN - HIDDEN` is not 0 where products and sums are rounded together
        fall = tl.exp2((m - base) * exponent)
        e = tl.exp2(s * exponent - (base * exponent)[:, None])
        weighted = weighted * fall + tl.sum(e * s, 1)
    total = total * fall + tl.sum(e, 1)
    squared = squared * fall * fall + tl.sum(e * e, 1)
    if (begin <= highest) & (begin + KEYS > lowest):
        is_first = column[None, :] == first[:, None]
        at_first = tl.maximum(at_first, tl.max(tl.where(is_first, s, -float("inf")), 1))
    return larger, total, weighted, squared, at_first


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    Q, K, M, S, F, SINK, LOG_SUM, MEAN, LARGEST, FIRST, SQUARE,
    scale, softcap, offset, before, after, queries, keys, heads, group,
    q_batch, q_head, q_row, k_batch, k_head, k_row, m_batch, m_head, m_row, m_key, s_batch, f_batch, f_row,
    D: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr, PACKED: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, EXACT: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Numbers of `QUERIES` rows of one head; `MASK` is 0 for none, 1 for booleans, 2 for what is added."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES  # under a causal mask the longest rows go first
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    row, d = start + tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    is_row, is_d = row < queries, d < D
    batch, head = batch.to(tl.int64), head.to(tl.int64)
    q = tl.load(
        Q + batch * q_batch + head * q_head + row[:, None] * q_row + d, mask=is_row[:, None] & is_d[None, :], other=0.0
    )
    first = tl.load(F + batch * f_batch + row * f_row, mask=is_row, other=0)
    lowest = tl.min(tl.where(is_row, first, keys), 0)
    highest = tl.max(first, 0)
    row_sequence = row
    if PACKED:
        row_sequence = tl.load(S + batch * s_batch + row, mask=is_row, other=-1)
    exponent = LOG2_E
    if not (CAPPED or MASK == 2):
        exponent = scale * LOG2_E
    m = tl.full([QUERIES], HIDDEN if MASK != 2 else -float("inf"), tl.float32)
    at_first = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    weighted = tl.zeros([QUERIES], tl.float32)
    squared = tl.zeros([QUERIES], tl.float32)
    low, high = 0, keys
    if BEFORE:
        low = tl.maximum(0, start + offset - before) // KEYS * KEYS
    if AFTER:
        high = tl.minimum(keys, start + QUERIES + offset + after)
    seen_by_all = low
    if not (BEFORE or PACKED or MASK != 0):
        seen_by_all = keys // KEYS * KEYS
        if AFTER:
            seen_by_all = tl.maximum(0, tl.minimum(seen_by_all, (start + offset + after + 1) // KEYS * KEYS))
    for begin in range(low, seen_by_all, KEYS):
        m, total, weighted, squared, at_first = _add_keys(
            q, row, row_sequence, first, m, total, weighted, squared, at_first, begin, batch, head, lowest, highest,
            K, M, S, exponent, scale, softcap, offset, before, after, keys, group,
            k_batch, k_head, k_row, m_batch, m_head, m_row, m_key, s_batch, is_row,
            D, WIDTH, MASK, PACKED, CAPPED, BEFORE, AFTER, EXACT, KEYS, True,
        )  # fmt: skip
    for begin in range(seen_by_all, high, KEYS):
        m, total, weighted, squared, at_first = _add_keys(
            q, row, row_sequence, first, m, total, weighted, squared, at_first, begin, batch, head, lowest, highest,
            K, M, S, exponent, scale, softcap, offset, before, after, keys, group,
            k_batch, k_head, k_row, m_batch, m_head, m_row, m_key, s_batch, is_row,
            D, WIDTH, MASK, PACKED, CAPPED, BEFORE, AFTER, EXACT, KEYS, False,
        )  # fmt: skip
    blind, nan = m == -float("inf"), float("nan")
    if MASK != 2:
        blind = m < NONE
        at_first = tl.where(at_first < NONE, -float("inf"), at_first)
    m, at_first, weighted = m * (exponent * LN_2), at_first * (exponent * LN_2), weighted * (exponent * LN_2)
    largest = tl.where(blind, -float("inf"), m)
    if SINKS:
        sink = tl.load(SINK + head).to(tl.float32)
        larger = tl.maximum(m, sink)
        fall, e = tl.exp(m - larger), tl.exp(sink - larger)
        total = total * fall + e
        weighted = weighted * fall + e * sink
        squared = squared * fall * fall
        m = larger
    log_sum = m + tl.log(total)
    at = tl.program_id(1).to(tl.int64) * queries + row
    tl.store(LOG_SUM + at, tl.where(blind, nan, log_sum), mask=is_row)
    tl.store(MEAN + at, tl.where(blind, nan, weighted / total), mask=is_row)
    tl.store(LARGEST + at, largest, mask=is_row)
    tl.store(FIRST + at, tl.where(blind, nan, tl.exp(at_first - log_sum)), mask=is_row)
    tl.store(SQUARE + at, tl.where(blind, nan, squared / (total * total)), mask=is_row)


def _blocks(d: int, dtype: torch.dtype) -> dict[str, int]:
    """Queries of a block, keys that it reads at once, and threads, by the width of heads."""
    if dtype == torch.float32 or d > 128:
        return {"QUERIES": 64, "KEYS": 32, "num_warps": 4, "num_stages": 2}
    return {"QUERIES": 64, "KEYS": 128, "num_warps": 4, "num_stages": 3}


def fused_row_statistics(scores: AttentionScores, first: Tensor) -> RowStatistics:
    """The numbers of every row of attention, by the kernel.

    Args:
        scores: How scores are made; `is_fused` takes them.
        first: The key that counts as the first one, by sample and query.
    """
    query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (scores.query, scores.key))
    batch, heads, queries, d = query.shape
    keys, like = key.shape[-2], query
    statistics = [torch.empty(batch, heads, queries, dtype=torch.float32, device=like.device) for _ in range(5)]
    mask, kind, mask_strides = like, 0, [0, 0, 0, 0]
    if scores.mask is not None:
        kind = 1 if scores.mask.dtype == torch.bool else 2
        mask = scores.mask[(None,) * (4 - scores.mask.ndim)].expand(batch, heads, queries, keys)
        mask_strides = list(mask.stride())
        mask = mask.view(torch.uint8) if kind == 1 else mask
    before, after = scores.window
    after = 0 if scores.causal else after
    sequence = like if scores.sequence is None else scores.sequence.contiguous()
    sinks = like if scores.sinks is None else scores.sinks.contiguous()
    options: dict[str, Any] = {
        "D": d, "WIDTH": max(16, triton.next_power_of_2(d)), "MASK": kind, "PACKED": scores.sequence is not None,
        "CAPPED": bool(scores.softcap), "SINKS": scores.sinks is not None, "BEFORE": before is not None,
        "AFTER": after is not None, "EXACT": query.dtype == torch.float32, **_blocks(d, query.dtype),
    }  # fmt: skip
    with torch.cuda.device_of(like):  # type: ignore[no-untyped-call]
        _kernel[triton.cdiv(queries, options["QUERIES"]), batch * heads](
            query, key, mask, sequence, first, sinks, *statistics,
            scores.factor, float(scores.softcap or 0.0), scores.offset, before or 0, after or 0, queries, keys, heads,
            heads // key.shape[1], *query.stride()[:3], *key.stride()[:3], *mask_strides,
            sequence.stride(0) if scores.sequence is not None else 0, *first.stride(), **options,
        )  # fmt: skip
    return RowStatistics(*statistics)

"""`row_statistics` on a GPU: one kernel that goes over the keys of a block of queries and holds no scores in memory.

The numbers of a row are kept while its keys go by, as flash attention keeps its sums: with m the largest score so far,

    sum = sum_j e^{s_j - m},   weighted = sum_j e^{s_j - m} s_j,   squared = sum_j e^{2 (s_j - m)},

all of them are scaled when m grows. `row_statistics.py` calls `fused_row_statistics` for scores that `is_fused` takes.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rankscope.live.attention.scores import AttentionScores
from rankscope.metrics.row_statistics import RowStatistics

WIDEST = 256  # The widest heads that fit into the registers of a block
QUERIES, KEYS = 64, 64  # Queries of a block, and keys that it reads at once


def is_fused(scores: AttentionScores) -> bool:
    """Whether the kernel makes these scores: on a GPU, without a function of the user's own, of heads not too wide."""
    fits = scores.query.shape[-1] <= WIDEST and scores.query.dtype != torch.float64
    return scores.query.is_cuda and scores.modified is None and fits


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
    start = tl.program_id(0) * QUERIES
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    row, d = start + tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    is_row, is_d = row < queries, d < D
    batch, head = batch.to(tl.int64), head.to(tl.int64)
    q = tl.load(
        Q + batch * q_batch + head * q_head + row[:, None] * q_row + d, mask=is_row[:, None] & is_d[None, :], other=0.0
    )
    first = tl.load(F + batch * f_batch + row * f_row, mask=is_row, other=0)
    if PACKED:
        own = tl.load(S + batch * s_batch + row, mask=is_row, other=-1)
    m = tl.full([QUERIES], -float("inf"), tl.float32)
    at_first = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    weighted = tl.zeros([QUERIES], tl.float32)
    squared = tl.zeros([QUERIES], tl.float32)
    low, high = 0, keys
    if BEFORE:
        low = tl.maximum(0, start + offset - before) // KEYS * KEYS
    if AFTER:
        high = tl.minimum(keys, start + QUERIES + offset + after)
    for begin in range(low, high, KEYS):
        column = begin + tl.arange(0, KEYS)
        is_key = column < keys
        k = tl.load(
            K + batch * k_batch + (head // group) * k_head + column[None, :] * k_row + d[:, None],
            mask=is_key[None, :] & is_d[:, None], other=0.0,
        )  # fmt: skip
        s = tl.dot(q, k, input_precision="ieee" if EXACT else "tf32") * scale
        if CAPPED:
            x = s / softcap
            fall = tl.exp(-2.0 * tl.abs(x))
            s = softcap * tl.where(x < 0, -1.0, 1.0) * (1.0 - fall) / (1.0 + fall)
        seen = is_key[None, :] & is_row[:, None]
        ahead = column[None, :] - row[:, None] - offset
        if BEFORE:
            seen = seen & (ahead >= -before)
        if AFTER:
            seen = seen & (ahead <= after)
        if PACKED:
            other = tl.load(S + batch * s_batch + column, mask=is_key, other=-2)
            seen = seen & (own[:, None] == other[None, :])
        if MASK != 0:
            at = M + batch * m_batch + head * m_head + row[:, None] * m_row + column[None, :] * m_key
            mask = tl.load(at, mask=is_row[:, None] & is_key[None, :], other=0)
            if MASK == 1:
                seen = seen & (mask != 0)
            else:
                s = s + mask.to(tl.float32)
        s = tl.where(seen, s, -float("inf"))
        larger = tl.maximum(m, tl.max(s, 1))
        base = tl.where(larger == -float("inf"), 0.0, larger)
        fall = tl.exp(m - base)
        e = tl.exp(s - base[:, None])
        total = total * fall + tl.sum(e, 1)
        weighted = weighted * fall + tl.sum(tl.where(e > 0, e * s, 0.0), 1)
        squared = squared * fall * fall + tl.sum(e * e, 1)
        is_first = column[None, :] == first[:, None]
        at_first = tl.maximum(at_first, tl.max(tl.where(is_first, s, -float("inf")), 1))
        m = larger
    largest = m
    if SINKS:
        sink = tl.load(SINK + head).to(tl.float32)
        larger = tl.maximum(m, sink)
        fall, e = tl.exp(m - larger), tl.exp(sink - larger)
        total = total * fall + e
        weighted = weighted * fall + e * sink
        squared = squared * fall * fall
        m = larger
    log_sum = m + tl.log(total)
    blind, nan = largest == -float("inf"), float("nan")
    at = tl.program_id(1).to(tl.int64) * queries + row
    tl.store(LOG_SUM + at, tl.where(blind, nan, log_sum), mask=is_row)
    tl.store(MEAN + at, tl.where(blind, nan, weighted / total), mask=is_row)
    tl.store(LARGEST + at, largest, mask=is_row)
    tl.store(FIRST + at, tl.where(blind, nan, tl.exp(at_first - log_sum)), mask=is_row)
    tl.store(SQUARE + at, tl.where(blind, nan, squared / (total * total)), mask=is_row)


def fused_row_statistics(scores: AttentionScores, first: Tensor) -> RowStatistics:
    """The numbers of every row of attention, by the kernel.

    Args:
        scores: How scores are made; `is_fused` takes them.
        first: The key that counts as the first one, by sample and query.
    """
    query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (scores.query, scores.key))
    batch, heads, queries, d = query.shape
    keys, like = key.shape[-2], query
    found = [torch.empty(batch, heads, queries, dtype=torch.float32, device=like.device) for _ in range(5)]
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
        "AFTER": after is not None, "EXACT": query.dtype == torch.float32, "QUERIES": QUERIES, "KEYS": KEYS,
    }  # fmt: skip
    with torch.cuda.device(like.device):
        _kernel[triton.cdiv(queries, QUERIES), batch * heads](
            query, key, mask, sequence, first, sinks, *found,
            scores.factor, float(scores.softcap or 0.0), scores.offset, before or 0, after or 0, queries, keys, heads,
            heads // key.shape[1], *query.stride()[:3], *key.stride()[:3], *mask_strides,
            sequence.stride(0) if scores.sequence is not None else 0, *first.stride(), **options,
        )  # fmt: skip
    return RowStatistics(*found)

"""`row_statistics`: what attention does, row by row, without its pattern.

The numbers, which a fused kernel goes through and throws away, are those of `metrics/rows.py`. Scores are
made again for a block of rows at a time, never all of them (`scores.py` says how). On a GPU `row_statistics_triton.py`
holds them in registers instead, for the kinds of scores that it knows. `attention_readings.py` reads metrics off them.
"""

from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import Tensor

from rankscope.errors import WatchError, require
from rankscope.live.attention.scores import AnyScores, AttentionScores
from rankscope.metrics import RowStatistics
from rankscope.shapes import Float, Int

HELD = 1 << 22  # Scores that are held at once


def row_statistics(scores: AnyScores, first: Int[Tensor, "#batch #query"] | None = None) -> RowStatistics:
    """The numbers of every row of attention: largest logit, entropy, weight of the first key, effective number of keys.

    Args:
        scores: How scores are made.
        first: The key that counts as the first one, by sample, or by sample and query; if left out, key 0, and of
            packed sequences the first of each.

    Raises:
        WatchError: Queries and keys do not fit together.

    >>> from rankscope.live import AttentionScores
    >>> even = AttentionScores(query=torch.zeros(1, 1, 2, 4), key=torch.ones(1, 1, 8, 4))
    >>> found = row_statistics(even)
    >>> found.effective_keys.flatten().tolist(), found.first.flatten().tolist()
    ([8.0, 8.0], [0.125, 0.125])
    """
    if isinstance(scores, AttentionScores):
        query, key = scores.query, scores.key
        fault = f"received queries {tuple(query.shape)} in {query.dtype} and keys {tuple(key.shape)} in {key.dtype}"
        of_axes = query.ndim == key.ndim == 4 and query.shape[-1] == key.shape[-1] and len(query) == len(key)
        fit = of_axes and query.is_floating_point() and key.numel() and query.numel()
        sentence = f"queries and keys must be [batch, head, token, d], not empty; {fault}"
        require(fit, sentence, WatchError, "query")
        sentence = f"each head of keys must serve as many heads of queries; {fault}"
        require(not query.shape[1] % key.shape[1], sentence, WatchError, "heads")
    batch, heads, queries, keys = scores.shape
    first = (scores.first_keys if first is None else first).expand(batch, queries)
    with torch.no_grad():
        statistics = _fused(scores, first)
        if statistics is None:
            several = max(1, HELD // max(1, batch * heads * keys))
            blocks = torch.split(torch.arange(queries, device=scores.device), several)
            parts = [_of_rows(scores, at, first[:, at]) for at in blocks]
            statistics = RowStatistics(*(torch.cat(numbers, -1) for numbers in zip(*parts, strict=True)))
        if scores.sinks is None:
            return statistics
        return replace(statistics, square=statistics.square + sink_weights(scores, statistics).square())


def _fused(scores: AnyScores, first: Tensor) -> RowStatistics | None:
    """The numbers by the kernel for GPUs; None where it does not apply."""
    if not isinstance(scores, AttentionScores) or not scores.query.is_cuda or find_spec("triton") is None:
        return None
    from rankscope.live.attention.row_statistics_triton import fused_row_statistics, is_fused

    return fused_row_statistics(scores, first) if is_fused(scores) else None


def sink_weights(scores: AnyScores, statistics: RowStatistics) -> Float[Tensor, "batch head query"]:
    """The weight that a sink takes from the keys of each row, `e^{sink - log_sum}`; 0 of heads without sinks."""
    if scores.sinks is None:
        return torch.zeros_like(statistics.log_sum)
    return (scores.sinks.to(statistics.log_sum)[:, None] - statistics.log_sum).exp()


def pattern_of(
    s: Float[Tensor, "batch head row key"], sinks: Float[Tensor, " head"] | None
) -> Float[Tensor, "batch head row key"]:
    """The rows of the pattern P that these rows of scores make; of a query that sees no key, zeros."""
    return (s - _log_sums(s, sinks)[..., None]).exp().masked_fill(s.amax(-1, keepdim=True) == -torch.inf, 0.0)


def _log_sums(s: Tensor, sinks: Tensor | None) -> Float[Tensor, "batch head row"]:
    """`log sum_j e^{s_ij}` of rows of scores, a sink among the keys."""
    log_sum = s.logsumexp(-1)
    return log_sum if sinks is None else torch.logaddexp(log_sum, sinks.to(s)[:, None])


def _of_rows(scores: AnyScores, at: Tensor, first: Tensor) -> tuple[Tensor, ...]:
    """The numbers of the rows at these positions, in the order of `RowStatistics`; `square` is of the keys alone."""
    s = scores.rows(at)
    log_sum = _log_sums(s, scores.sinks)
    p = (s - log_sum[..., None]).exp()
    mean = torch.where(p > 0, p * s, 0.0).sum(-1)
    if scores.sinks is not None:
        sink = scores.sinks.to(s)[:, None]
        mean = mean + (sink - log_sum).exp() * sink
    at_first = p.gather(-1, first[:, None, :, None].expand(*p.shape[:-1], 1))[..., 0]
    largest = s.amax(-1)
    blind = largest == -torch.inf
    numbers = (log_sum, mean, at_first, p.square().sum(-1))
    log_sum, mean, at_first, square = (x.masked_fill(blind, torch.nan) for x in numbers)
    return log_sum, mean, largest, at_first, square

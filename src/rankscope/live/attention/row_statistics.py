"""What attention does, row by row, without its pattern: numbers that a fused kernel goes through and throws away.

Of the scores `s_ij` of query i over the keys j that the query sees, and of their softmax P:

| number    | what it is                  | what it is for                                                         |
|-----------|-----------------------------|------------------------------------------------------------------------|
| `log_sum` | `log sum_j e^{s_ij}`        | the log-sum-exp that flash attention keeps for its backward pass       |
| `mean`    | `sum_j P_ij s_ij`           | the entropy is `log_sum - mean`: `-sum P log P = sum P (log_sum - s)`  |
| `largest` | `max_j s_ij`                | the largest logit                                                      |
| `first`   | `P_ij` of the first key     | the attention sink                                                     |
| `square`  | `sum_j P_ij^2`              | `1 / square` is the effective number of keys                           |

`Scores` says how a kernel makes its scores; the observers of this folder fill it in from the arguments of the call
that they saw. `row_statistics` then makes the scores of a block of rows at a time, never all of them. On a GPU
`row_statistics_triton.py` holds them in registers instead, for the kinds of scores that it knows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from rankscope.errors import WatchError
from rankscope.shapes import Bool, Float, Int

HELD = 1 << 22  # Scores that are held at once


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of queries and keys, as a kernel makes them: `modified(softcap(scale * q_i k_j)) + mask`.

    Args:
        query: Queries.
        key: Keys; a head of keys may serve a group of heads of queries.
        scale: The factor of the products; `1 / sqrt(d)` if left out.
        softcap: c where scores are replaced by `c tanh(s / c)`.
        causal: Whether query i sees no key after `i + offset`.
        offset: By how many positions queries are behind keys, where some keys come from a cache.
        window: How many keys before and after position `i + offset` query i sees; None for all.
        mask: What is added to scores, or, as booleans, which keys are seen; of axes that broadcast.
        modified: A function of scores of some rows and of the first of these rows, as `score_mod` of flex attention is.
        sinks: A score of each head that takes weight from the keys of every row and leads to no value.
        sequence: The number of the sequence that each token of a packed row belongs to; tokens see their own one.
    """

    query: Float[Tensor, "batch head query d"]
    key: Float[Tensor, "batch group key d"]
    scale: float | None = None
    softcap: float | None = None
    causal: bool = False
    offset: int = 0
    window: tuple[int | None, int | None] = (None, None)
    mask: Tensor | None = None
    modified: Callable[[Tensor, int], Tensor] | None = None
    sinks: Float[Tensor, " head"] | None = None
    sequence: Int[Tensor, "batch token"] | None = None

    @property
    def factor(self) -> float:
        """The factor of the products of queries and keys."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else float(self.scale)

    def rows(self, start: int, stop: int) -> Float[Tensor, "batch head row key"]:
        """The scores of some queries, minus infinity at keys that a query does not see, in float32 or wider."""
        wide = torch.promote_types(self.query.dtype, torch.float32)
        query, key = self.query[:, :, start:stop].to(wide), self.key.to(wide)
        batch, heads, rows, d = query.shape
        grouped = query.reshape(batch, key.shape[1], -1, rows, d)
        s = (grouped @ key[:, :, None].mT).reshape(batch, heads, rows, -1) * self.factor
        if self.softcap:
            s = (s / self.softcap).tanh() * self.softcap
        if self.modified is not None:
            s = self.modified(s, start)
        if self.mask is not None and self.mask.dtype != torch.bool:
            s = s + _some_rows(self.mask, start, stop).to(wide)
        seen = self.seen(start, stop)
        return s if seen is None else s.masked_fill(~seen, -torch.inf)

    def seen(self, start: int, stop: int) -> Bool[Tensor, "#batch #head row key"] | None:
        """True where a query sees a key; None where every query sees all."""
        found, device = [], self.query.device
        if self.mask is not None and self.mask.dtype == torch.bool:
            found.append(_some_rows(self.mask, start, stop))
        at = torch.arange(start, stop, device=device)[:, None] + self.offset
        ahead = torch.arange(self.key.shape[-2], device=device) - at
        before, after = self.window
        if before is not None:
            found.append((ahead >= -before)[None, None])
        if self.causal or after is not None:
            found.append((ahead <= (0 if self.causal else after))[None, None])
        if self.sequence is not None:
            found.append((self.sequence[:, start:stop, None] == self.sequence[:, None, :])[:, None])
        if not found:
            return None
        seen = found[0]
        for other in found[1:]:
            seen = seen & other
        return seen


@dataclass(frozen=True)
class RowStatistics:
    """The numbers of the module's table, of every query; NaN, and a `largest` of minus infinity, of one without keys.

    >>> even = Scores(query=torch.zeros(1, 1, 2, 4), key=torch.ones(1, 1, 8, 4))
    >>> found = row_statistics(even)
    >>> (1 / found.square).flatten().tolist(), found.first.flatten().tolist()
    ([8.0, 8.0], [0.125, 0.125])
    """

    log_sum: Float[Tensor, "batch head query"]
    mean: Float[Tensor, "batch head query"]
    largest: Float[Tensor, "batch head query"]
    first: Float[Tensor, "batch head query"]
    square: Float[Tensor, "batch head query"]

    @property
    def entropy(self) -> Float[Tensor, "batch head query"]:
        """The entropy of each row in nats; the sink of a head that has one counts as a key."""
        return (self.log_sum - self.mean).clamp(min=0.0)


def row_statistics(scores: Scores, first: Int[Tensor, "#batch #query"] | None = None) -> RowStatistics:
    """The numbers of every row of attention.

    Args:
        scores: How scores are made.
        first: The key that counts as the first one, by sample, or by sample and query; key 0 if left out.

    Raises:
        WatchError: Heads of queries cannot be shared out among heads of keys.
    """
    batch, heads, queries, _ = scores.query.shape
    if scores.key.shape[1] == 0 or heads % scores.key.shape[1]:
        came = f"{heads} heads of queries and {scores.key.shape[1]} of keys came"
        raise WatchError(f"each head of keys must serve as many heads of queries; {came}", subject="heads")
    if first is None:
        first = torch.zeros(1, 1, dtype=torch.long, device=scores.query.device)
    first = first.expand(batch, queries)
    if scores.query.is_cuda and find_spec("triton") is not None:
        from rankscope.live.attention.row_statistics_triton import fused_row_statistics, is_fused

        if is_fused(scores):
            return fused_row_statistics(scores, first)
    several = max(1, HELD // max(1, batch * heads * scores.key.shape[-2]))
    parts = [
        _of_rows(scores, start, min(start + several, queries), first[:, start : start + several])
        for start in range(0, queries, several)
    ]
    return RowStatistics(*(torch.cat(numbers, -1) for numbers in zip(*parts, strict=True)))


def _of_rows(scores: Scores, start: int, stop: int, first: Tensor) -> tuple[Tensor, ...]:
    """The numbers of some rows, in the order of `RowStatistics`."""
    s = scores.rows(start, stop)
    log_sum = s.logsumexp(-1)
    if scores.sinks is not None:
        sink = scores.sinks.to(s)[:, None]
        log_sum = torch.logaddexp(log_sum, sink)
    p = (s - log_sum[..., None]).exp()
    mean = torch.where(p > 0, p * s, 0.0).sum(-1)
    if scores.sinks is not None:
        mean = mean + (sink - log_sum).exp() * sink
    at_first = p.gather(-1, first[:, None, :, None].expand(*p.shape[:-1], 1))[..., 0]
    blind = s.amax(-1) == -torch.inf
    numbers = (log_sum, mean, at_first, p.square().sum(-1))
    log_sum, mean, at_first, square = (x.masked_fill(blind, torch.nan) for x in numbers)
    return log_sum, mean, s.amax(-1), at_first, square


def _some_rows(mask: Tensor, start: int, stop: int) -> Tensor:
    """The rows of some queries of a mask, with four axes; one row for all stays one."""
    mask = mask[(None,) * (4 - mask.ndim)]
    return mask if mask.shape[-2] == 1 else mask[..., start:stop, :]

"""How a kernel makes its scores, so that they can be made again, some rows at a time.

The observers of this folder fill `AttentionScores` in from the arguments of the call that they saw, or hand on scores
that a module made itself as `WrittenScores`. `row_statistics.py` reads both.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from rankscope.errors import WatchError
from rankscope.shapes import Bool, Float, Int


@dataclass(frozen=True, kw_only=True)
class AttentionScores:
    """Scores of queries and keys, as a kernel makes them: `modified(softcap(scale * q_i k_j)) + mask`.

    Args:
        query: Queries `[batch, head, query, d]`.
        key: Keys `[batch, group, key, d]`; a head of keys may serve a group of heads of queries.
        scale: The factor of the products; `1 / sqrt(d)` if left out.
        softcap: c where scores are replaced by `c tanh(s / c)`.
        causal: Whether query i sees no key after `i + offset`.
        offset: By how many positions queries are behind keys, where some keys come from a cache.
        window: How many keys before and after position `i + offset` query i sees; None for all.
        mask: What is added to scores, or, as booleans, which keys are seen; of axes that broadcast.
        modified: A function of scores of some rows and of the positions of these queries, as `score_mod` of flex
            attention is of one score.
        sinks: A score of each head that takes weight from the keys of every row and leads to no value.
        sequence: The number of the sequence that each token of a packed row belongs to; tokens see their own one.
    """

    query: Tensor  # `row_statistics` says in a sentence what does not fit
    key: Tensor
    scale: float | None = None
    softcap: float | None = None
    causal: bool = False
    offset: int = 0
    window: tuple[int | None, int | None] = (None, None)
    mask: Tensor | None = None
    modified: Callable[[Tensor, Tensor], Tensor] | None = None
    sinks: Float[Tensor, " head"] | None = None
    sequence: Int[Tensor, "batch token"] | None = None

    @classmethod
    def packed(cls, query: Tensor, key: Tensor, cu_seqlens: Tensor, **options: Any) -> "AttentionScores":
        """Scores of sequences that are packed one after another, as kernels of variable lengths take them: one sample,
        in which tokens see their own sequence.

        Args:
            query: Queries `[token, head, d]` of all tokens.
            key: Keys `[token, group, d]` of all tokens.
            cu_seqlens: Where sequences begin and end: 0, the length of the first, of the first two, ...; of all.
            options: Other arguments of `AttentionScores`, such as `causal=True`.

        Raises:
            WatchError: The sequences are not those of the tokens.

        >>> q = torch.zeros(5, 2, 4)
        >>> AttentionScores.packed(q, q, torch.tensor([0, 2, 5])).seen(torch.arange(5))[0, 0].sum(-1).tolist()
        [2, 2, 3, 3, 3]
        """
        ends = cu_seqlens.to(query.device, torch.long)
        fits = ends.ndim == 1 and len(ends) > 1 and query.ndim == key.ndim == 3 and len(query) == len(key)
        if not fits or ends[0] != 0 or ends[-1] != len(query) or bool((ends.diff() < 0).any()):
            fault = f"queries {tuple(query.shape)}, keys {tuple(key.shape)} and {ends.tolist()} came"
            expected = "packed tokens must be [total, head, d], and cu_seqlens rise from 0 to their number"
            raise WatchError(f"{expected}; {fault}", subject="cu_seqlens")
        sequence = torch.repeat_interleave(torch.arange(len(ends) - 1, device=query.device), ends.diff())
        query, key = (x.transpose(0, 1)[None] for x in (query, key))
        return cls(query=query, key=key, sequence=sequence[None], **options)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The numbers of samples, heads, queries and keys."""
        batch, heads, queries, _ = self.query.shape
        return batch, heads, queries, self.key.shape[-2]

    @property
    def device(self) -> torch.device:
        """Where the scores are made."""
        return self.query.device

    @property
    def first_keys(self) -> Int[Tensor, "#batch #query"]:
        """The first key of each query: key 0, or, of a packed row, the first of the query's own sequence."""
        if self.sequence is None:
            return torch.zeros(1, 1, dtype=torch.long, device=self.device)
        begins = torch.arange(self.sequence.shape[-1], device=self.device).expand(self.sequence.shape).clone()
        begins[:, 1:].masked_fill_(self.sequence[:, 1:] == self.sequence[:, :-1], 0)
        return begins.cummax(-1).values

    @property
    def kind(self) -> tuple[object, ...]:
        """How the scores are made, without the numbers in tensors: what is true of the way in one call is true in
        another with the same."""
        tensors = (self.query, self.key, self.mask, self.sinks, self.sequence)
        dtypes = (None if x is None else x.dtype for x in tensors)
        heads = (self.query.shape[1], self.key.shape[1], self.query.shape[-1])
        options = (self.scale, self.softcap, self.causal, self.offset, self.window, self.modified is None)
        return (*options, *heads, *dtypes)

    @property
    def factor(self) -> float:
        """The factor of the products of queries and keys."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else float(self.scale)

    def of_keys(self, keys: Bool[Tensor, "batch key"]) -> "AttentionScores":
        """These scores where queries see no other keys than these."""
        unseen, modified = ~keys[:, None, None], self.modified
        if self.mask is None:
            return replace(self, mask=~unseen)

        def also_hidden(scores: Tensor, at: Tensor) -> Tensor:
            changed = scores if modified is None else modified(scores, at)
            return changed.masked_fill(unseen, -torch.inf)

        return replace(self, modified=also_hidden)

    def rows(self, at: Int[Tensor, " row"]) -> Float[Tensor, "batch head row key"]:
        """The scores of the queries at these positions, minus infinity at keys that a query does not see, in float32 or
        wider."""
        wide = torch.promote_types(self.query.dtype, torch.float32)
        query, key = self.query[:, :, at].to(wide), self.key.to(wide)
        batch, heads, rows, d = query.shape
        grouped = query.reshape(batch, key.shape[1], -1, d)  # the heads of a group below each other: no key is copied
        s = (grouped @ key.mT).reshape(batch, heads, rows, -1) * self.factor
        if self.softcap:
            s = (s / self.softcap).tanh() * self.softcap
        if self.modified is not None:
            s = self.modified(s, at)
        if self.mask is not None and self.mask.dtype != torch.bool:
            s = s + _some_rows(self.mask, at).to(wide)
        seen = self.seen(at)
        return s if seen is None else s.masked_fill(~seen, -torch.inf)

    def seen(self, at: Int[Tensor, " row"]) -> Bool[Tensor, "#batch #head row key"] | None:
        """True where a query at one of these positions sees a key; None where every query sees all."""
        masks = []
        if self.mask is not None and self.mask.dtype == torch.bool:
            masks.append(_some_rows(self.mask, at))
        ahead = torch.arange(self.key.shape[-2], device=self.device) - (at[:, None] + self.offset)
        before, after = self.window
        after = 0 if self.causal else after
        if before is not None:
            masks.append((ahead >= -before)[None, None])
        if after is not None:
            masks.append((ahead <= after)[None, None])
        if self.sequence is not None:
            masks.append((self.sequence[:, at, None] == self.sequence[:, None, :])[:, None])
        return reduce(torch.logical_and, masks) if masks else None


@dataclass(frozen=True)
class WrittenScores:
    """Scores that a module made itself, `[batch, head, query, key]`, minus infinity at keys that are not seen."""

    scores: Float[Tensor, "batch head query key"]
    keys: Bool[Tensor, "batch key"] | None = None  # those that queries see; None for all
    sinks: None = None
    sequence: None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The numbers of samples, heads, queries and keys."""
        batch, heads, queries, keys = self.scores.shape
        return batch, heads, queries, keys

    @property
    def kind(self) -> tuple[object, ...]:
        """How the scores are made: by a module, in a dtype."""
        return (self.scores.dtype,)

    @property
    def device(self) -> torch.device:
        """The device that the scores are on."""
        return self.scores.device

    @property
    def first_keys(self) -> Int[Tensor, "#batch #query"]:
        """The first key of each query: key 0."""
        return torch.zeros(1, 1, dtype=torch.long, device=self.device)

    def rows(self, at: Int[Tensor, " row"]) -> Float[Tensor, "batch head row key"]:
        """The scores of the queries at these positions, in float32 or wider."""
        s = self.scores[:, :, at].to(torch.promote_types(self.scores.dtype, torch.float32))
        return s if self.keys is None else s.masked_fill(~self.keys[:, None, None], -torch.inf)

    def of_keys(self, keys: Bool[Tensor, "batch key"]) -> "WrittenScores":
        """These scores where queries see no other keys than these."""
        return replace(self, keys=keys)


AnyScores = AttentionScores | WrittenScores


def _some_rows(mask: Tensor, at: Tensor) -> Tensor:
    """The rows of a mask at these positions, with four axes; one row for all stays one."""
    mask = mask[(None,) * (4 - mask.ndim)]
    return mask if mask.shape[-2] == 1 else mask[..., at, :]

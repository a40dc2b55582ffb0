"""An attention matrix by its rows, which may be made as they are asked for: a metric that needs them more
than once takes a block at a time, as often as it likes, and P is never held whole."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rankscope.shapes import Bool, Float

AT_ONCE = 2**25
"""Bytes of a block of rows."""


@dataclass(frozen=True)
class PatternRows:
    """The rows of P of several samples and heads, held or made on demand."""

    batch: int
    heads: int
    make: Callable[[int, int, int, int], Float[Tensor, "row token"]]
    """Of a sample and a head, rows `start` to `stop`, float64, zero at padding."""
    valid: Bool[Tensor, "batch token"]
    """Rows that count."""

    @classmethod
    def of(
        cls, P: Float[Tensor, "*batch head token token"], valid: Bool[Tensor, "*batch 1 token"]
    ) -> "PatternRows":
        """The rows of a matrix that is held."""
        held = P.reshape(-1, *P.shape[-3:])
        counts = valid.expand(*P.shape[:-3], 1, P.shape[-1]).reshape(-1, P.shape[-1])
        unpadded = bool(counts.all())

        def make(sample: int, head: int, start: int, stop: int) -> Tensor:
            rows = held[sample, head, start:stop].to(torch.float64)
            return rows if unpadded else rows.masked_fill(~counts[sample], 0.0)

        return cls(len(held), P.shape[-3], make, counts)

    def map_heads(self, number: Callable[["HeadRows"], float | Tensor]) -> Float[Tensor, "batch head"]:
        """A number of every head; NaN of a sample without tokens."""
        values = torch.full(
            (self.batch, self.heads), torch.nan, dtype=torch.float64, device=self.valid.device
        )
        for sample in range(self.batch):
            which = self.valid[sample].nonzero()[:, 0]
            for head in range(self.heads if len(which) else 0):
                values[sample, head] = number(HeadRows(self, sample, head, which))
        return values


@dataclass(frozen=True)
class HeadRows:
    """The rows of P of one head of one sample."""

    of: PatternRows
    sample: int
    head: int
    which: Tensor
    """The rows that count."""

    def __len__(self) -> int:
        return len(self.which)

    @property
    def block(self) -> int:
        """How many rows are made at once."""
        return max(1, AT_ONCE // (8 * self.of.valid.shape[1]))

    def rows(self, start: int, stop: int) -> Float[Tensor, "row token"]:
        """Rows `start` to `stop` of those that count."""
        which = self.which[start:stop]
        first, last = int(which[0]), int(which[-1]) + 1
        rows = self.of.make(self.sample, self.head, first, last)
        return rows if last - first == len(which) else rows[which - first]

    def blocks(self) -> Iterator[tuple[int, Float[Tensor, "row token"]]]:
        """Every row that counts, a block at a time, with the number of its first."""
        for start in range(0, len(self), self.block):
            yield start, self.rows(start, min(len(self), start + self.block))

"""Copying: random symbols, a mark, and then the same symbols again, one after the other.

a c b | a c        each of the second half must be foretold, from the mark on
- - - a c b
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from rankscope.lab.model import Interface
from rankscope.lab.tasks.task import HELD_OUT, UNLABELLED, Batch, Task, decoder, drawn_from
from rankscope.nets import Architecture


@dataclass(frozen=True)
class Copying(Task):
    """`length` symbols of so many; the last symbol is the mark."""

    symbols: int = 16
    length: int = 16
    name: ClassVar[str] = "copying"
    says: ClassVar[str] = "the symbols before a mark, once more"

    @property
    def interface(self) -> Interface:
        """The mark is a symbol that is never foretold."""
        return Interface(classes=self.symbols, symbols=self.symbols + 1)

    def batch(self, samples: int, seed: int, step: int) -> Batch:
        """Drawn anew at every step."""
        return self._drawn(samples, drawn_from(seed, step))

    def held_out(self, samples: int) -> Batch:
        """Drawn from a seed of their own."""
        return self._drawn(samples, drawn_from(0, HELD_OUT))

    def _drawn(self, samples: int, draw: torch.Generator) -> Batch:
        symbols = torch.randint(self.symbols, (samples, self.length), generator=draw)
        mark, none = torch.full((samples, 1), self.symbols), torch.full_like(symbols, UNLABELLED)
        return Batch(torch.cat([symbols, mark, symbols[:, :-1]], 1), torch.cat([none, symbols], 1))

    def architecture(self, layers: int, width: int, heads: int = 4, **fields: Any) -> Architecture:
        """A decoder as long as both copies."""
        return decoder(layers, width, heads, 2 * self.length, fields)

    @property
    def chance(self) -> float:
        """A guess of any symbol."""
        return 1 / self.symbols

"""Induction: a random sequence of symbols, repeated. What followed a symbol last time follows it again.

a c b d  a c b d        from its second symbol on, the repetition can be foretold
- - - -  c b d -
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from rankscope.lab.model import Interface
from rankscope.lab.tasks.task import HELD_OUT, UNLABELLED, Batch, Task, decoder, drawn_from
from rankscope.nets import Architecture


@dataclass(frozen=True)
class Induction(Task):
    """Sequences of `shortest` to `longest` symbols, no symbol twice, repeated to `context` tokens. Lengths
    are drawn, so that where to look cannot be learnt as a distance."""

    symbols: int = 32
    shortest: int = 8
    longest: int = 24
    context: int = 48
    name: ClassVar[str] = "induction"
    says: ClassVar[str] = "what followed a symbol last time"

    @property
    def interface(self) -> Interface:
        """A class for each symbol."""
        return Interface(classes=self.symbols, symbols=self.symbols)

    def batch(self, samples: int, seed: int, step: int) -> Batch:
        """Drawn anew at every step."""
        return self._drawn(samples, drawn_from(seed, step))

    def held_out(self, samples: int) -> Batch:
        """Drawn from a seed of their own."""
        return self._drawn(samples, drawn_from(0, HELD_OUT))

    def _drawn(self, samples: int, draw: torch.Generator) -> Batch:
        order = torch.rand(samples, self.symbols, generator=draw).argsort(-1)
        period = torch.randint(self.shortest, self.longest + 1, (samples, 1), generator=draw)
        at = torch.arange(self.context + 1)
        symbols = order.gather(1, at % period)
        labels = symbols[:, 1:].masked_fill(at[:-1] < period, UNLABELLED)
        return Batch(symbols[:, :-1], labels)

    def architecture(self, layers: int, width: int, heads: int = 4, **fields: Any) -> Architecture:
        """A decoder as long as the context."""
        return decoder(layers, width, heads, self.context, fields)

    @property
    def chance(self) -> float:
        """A guess of any symbol."""
        return 1 / self.symbols

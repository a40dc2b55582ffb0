"""Tasks of random symbols, drawn anew at every step: copying and induction.

copying    a c b | a c      random symbols, a mark, and the same symbols again: each is foretold from the
           - - - a c b      mark on

induction  a c b d a c b d  a random sequence, repeated: from its second symbol on the repetition can be
           - - - - c b d -  foretold, as what followed a symbol last time follows it again
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from rankscope.lab.model import Interface
from rankscope.lab.tasks.task import HELD_OUT, UNLABELLED, Batch, Task, decoder, drawn_from
from rankscope.nets import Architecture


class RandomSequences(Task):
    """A task whose samples are drawn from a generator, those held out from a seed of their own."""

    symbols: int

    @abstractmethod
    def drawn(self, samples: int, draw: torch.Generator) -> Batch:
        """Draw so many sequences and the labels of their tokens."""

    def batch(self, samples: int, seed: int, step: int) -> Batch:
        """Sequences drawn anew at every step."""
        return self.drawn(samples, drawn_from(seed, step))

    def held_out(self, samples: int) -> Batch:
        """Sequences that no step draws."""
        return self.drawn(samples, drawn_from(0, HELD_OUT))

    @property
    def chance(self) -> float:
        """A guess of any symbol."""
        return 1 / self.symbols


@dataclass(frozen=True)
class Copying(RandomSequences):
    """Copying of `length` symbols of so many; the last symbol is the mark."""

    symbols: int = 16
    length: int = 16
    name: ClassVar[str] = "copying"
    says: ClassVar[str] = "the symbols before a mark, once more"

    @property
    def interface(self) -> Interface:
        """The mark is a symbol that is never foretold."""
        return Interface(classes=self.symbols, symbols=self.symbols + 1)

    def drawn(self, samples: int, draw: torch.Generator) -> Batch:
        """Symbols, the mark, and all of them but the last again."""
        symbols = torch.randint(self.symbols, (samples, self.length), generator=draw)
        mark, none = torch.full((samples, 1), self.symbols), torch.full_like(symbols, UNLABELLED)
        return Batch(torch.cat([symbols, mark, symbols[:, :-1]], 1), torch.cat([none, symbols], 1))

    def architecture(self, layers: int, width: int, heads: int = 4, **fields: Any) -> Architecture:
        """A decoder as long as both copies."""
        return decoder(layers, width, heads, 2 * self.length, fields)


@dataclass(frozen=True)
class Induction(RandomSequences):
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

    def drawn(self, samples: int, draw: torch.Generator) -> Batch:
        """Repeated sequences; the label of a token is the next one, from the second repetition on."""
        order = torch.rand(samples, self.symbols, generator=draw).argsort(-1)
        period = torch.randint(self.shortest, self.longest + 1, (samples, 1), generator=draw)
        at = torch.arange(self.context + 1)
        symbols = order.gather(1, at % period)
        labels = symbols[:, 1:].masked_fill(at[:-1] < period, UNLABELLED)
        return Batch(symbols[:, :-1], labels)

    def architecture(self, layers: int, width: int, heads: int = 4, **fields: Any) -> Architecture:
        """A decoder as long as the context."""
        return decoder(layers, width, heads, self.context, fields)

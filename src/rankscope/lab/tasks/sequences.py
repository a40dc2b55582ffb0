"""Tasks of sequences: the next character of a text, and random symbols, drawn anew at every step.

next-character   a text is written on, letter by letter; the last tenth of it is held out

copying    a c b | a c      random symbols, a mark, and the same symbols again: each is foretold from the
           - - - a c b      mark on

induction  a c b d a c b d  a random sequence, repeated: from its second symbol on the repetition can be
           - - - - c b d -  foretold, as what followed a symbol last time follows it again
"""

from abc import abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import ClassVar

import torch
from torch import Tensor

from rankscope.lab.model import Interface
from rankscope.lab.tasks.base import HELD_OUT, STEPS, UNLABELLED, Batch, Task, drawn_from
from rankscope.shapes import Int

HELD_SHARE = 0.1  # Of the text, its end, which no training sees


@lru_cache(maxsize=4)
def characters(text: str | None = None) -> tuple[str, Int[Tensor, " character"]]:
    """The alphabet of a text and the text as indices into it; of the bundled one (Moby Dick, chapters 1 to 35)
    if left out.

    >>> characters("abba")
    ('ab', tensor([0, 1, 1, 0]))
    """
    if text is None:
        text = files("rankscope").joinpath("data/moby_dick.txt").read_text(encoding="utf-8")
    alphabet = "".join(sorted({*text}))
    indices = {character: k for k, character in enumerate(alphabet)}
    return alphabet, torch.tensor([indices[character] for character in text])


@dataclass(frozen=True)
class NextCharacter(Task):
    """Prediction of the next character of the bundled text (Moby Dick), or of one that is given."""

    context: int = 64
    text: str | None = field(default=None, repr=False)
    name: ClassVar[str] = "next-character"

    @property
    def alphabet(self) -> str:
        """The characters of the text, in their order."""
        return characters(self.text)[0]

    @property
    def ids(self) -> Int[Tensor, " character"]:
        """The text as indices into the alphabet."""
        return characters(self.text)[1]

    @property
    def interface(self) -> Interface:
        """A class for each character of the alphabet."""
        return Interface(classes=len(self.alphabet), symbols=len(self.alphabet))

    def batch(self, samples: int, seed: int, step: int) -> Batch:
        """Excerpts of the first nine tenths."""
        return self._excerpts(self.ids[: self._learnt], samples, seed * STEPS + step)

    def held_out(self, samples: int) -> Batch:
        """Excerpts of the last tenth, of which no step draws any: their seed may be that of a step."""
        return self._excerpts(self.ids[self._learnt :], samples, 0)

    @property
    def _learnt(self) -> int:
        """Characters that are learnt from; the rest is held out."""
        return len(self.ids) - round(HELD_SHARE * len(self.ids))

    def _excerpts(self, ids: Tensor, samples: int, seed: int) -> Batch:
        starts = torch.randint(len(ids) - self.context - 1, (samples,), generator=torch.Generator().manual_seed(seed))
        excerpts = ids[starts[:, None] + torch.arange(self.context + 1)]
        return Batch(excerpts[:, :-1], excerpts[:, 1:])

    @property
    def chance(self) -> float:
        """The share of the most frequent character."""
        return float(self.ids.bincount().max() / len(self.ids))


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

    @property
    def interface(self) -> Interface:
        """The mark is a symbol that is never foretold."""
        return Interface(classes=self.symbols, symbols=self.symbols + 1)

    def drawn(self, samples: int, draw: torch.Generator) -> Batch:
        """Symbols, the mark, and all of them but the last again."""
        symbols = torch.randint(self.symbols, (samples, self.length), generator=draw)
        mark, none = torch.full((samples, 1), self.symbols), torch.full_like(symbols, UNLABELLED)
        return Batch(torch.cat([symbols, mark, symbols[:, :-1]], 1), torch.cat([none, symbols], 1))

    @property
    def context(self) -> int:  # type: ignore[override]
        """Tokens of a sample: both copies."""
        return 2 * self.length


@dataclass(frozen=True)
class Induction(RandomSequences):
    """Sequences of `shortest` to `longest` symbols, no symbol twice, repeated to `context` tokens. Lengths
    are drawn, so that where to look cannot be learnt as a distance."""

    symbols: int = 32
    shortest: int = 8
    longest: int = 24
    context: int = 48
    name: ClassVar[str] = "induction"

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

"""Next character: a text is written on, letter by letter. The last tenth of it is held out."""

from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from typing import Any, ClassVar

import torch
from torch import Tensor

from rankscope.lab.model import Interface
from rankscope.lab.tasks.task import HELD_OUT, STEPS, Batch, Task, decoder
from rankscope.nets import Architecture
from rankscope.shapes import Int

HELD_SHARE = 0.1


@dataclass(frozen=True)
class Characters:
    """A text as numbers: each is an index into the alphabet."""

    ids: Int[Tensor, " character"]
    alphabet: str

    def excerpts(self, samples: int, length: int, seed: int) -> Int[Tensor, "samples length"]:
        """Excerpts drawn at random; the same for the same seed."""
        draw = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(self.ids) - length, (samples,), generator=draw)
        return self.ids[starts[:, None] + torch.arange(length)]


def characters(text: str | None = None) -> Characters:
    """The characters of a text; of the bundled one (Moby Dick, chapters 1 to 35) if left out.

    >>> characters("abba").ids
    tensor([0, 1, 1, 0])
    """
    if text is None:
        text = files("rankscope").joinpath("data/moby_dick.txt").read_text(encoding="utf-8")
    alphabet = "".join(sorted({*text}))
    indices = {character: k for k, character in enumerate(alphabet)}
    return Characters(torch.tensor([indices[character] for character in text]), alphabet)


@dataclass(frozen=True)
class NextCharacter(Task):
    """Prediction of the next character of the bundled text (Moby Dick), or of one that is given."""

    context: int = 64
    text: str | None = field(default=None, repr=False)
    name: ClassVar[str] = "next-character"
    says: ClassVar[str] = "the next character of a text"

    @cached_property
    def characters(self) -> Characters:
        """The text as numbers, all of it."""
        return characters(self.text)

    @cached_property
    def _parts(self) -> tuple[Characters, Characters]:
        ids, alphabet = self.characters.ids, self.characters.alphabet
        first = len(ids) - round(HELD_SHARE * len(ids))
        return Characters(ids[:first], alphabet), Characters(ids[first:], alphabet)

    @property
    def interface(self) -> Interface:
        """A class for each character of the alphabet."""
        symbols = len(self.characters.alphabet)
        return Interface(classes=symbols, symbols=symbols)

    def batch(self, samples: int, seed: int, step: int) -> Batch:
        """Excerpts of the first nine tenths."""
        return _shifted(self._parts[0].excerpts(samples, self.context + 1, seed * STEPS + step))

    def held_out(self, samples: int) -> Batch:
        """Excerpts of the last tenth."""
        return _shifted(self._parts[1].excerpts(samples, self.context + 1, HELD_OUT))

    def architecture(self, layers: int, width: int, heads: int = 4, **fields: Any) -> Architecture:
        """A decoder as long as the context."""
        return decoder(layers, width, heads, self.context, fields)

    @property
    def chance(self) -> float:
        """The share of the most frequent character."""
        ids = self.characters.ids
        return float(ids.bincount().max() / len(ids))


def _shifted(ids: torch.Tensor) -> Batch:
    return Batch(ids[:, :-1], ids[:, 1:])

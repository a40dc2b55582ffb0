"""Next character: a text is written on, letter by letter. The last tenth of it is held out."""

from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import Any, ClassVar

import torch
from torch import Tensor

from rankscope.lab.model import Interface
from rankscope.lab.tasks.task import STEPS, Batch, Task, decoder
from rankscope.nets import Architecture
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
    says: ClassVar[str] = "the next character of a text"

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

    def architecture(self, layers: int, width: int, heads: int = 4, **fields: Any) -> Architecture:
        """A decoder as long as the context."""
        return decoder(layers, width, heads, self.context, fields)

    @property
    def chance(self) -> float:
        """The share of the most frequent character."""
        return float(self.ids.bincount().max() / len(self.ids))

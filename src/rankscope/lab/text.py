"""The bundled text as a stream of characters."""

from dataclasses import dataclass
from importlib.resources import files

import torch
from torch import Tensor

from rankscope.shapes import Int


@dataclass(frozen=True)
class Characters:
    """A text as numbers: each is a place in the alphabet."""

    ids: Int[Tensor, " character"]
    alphabet: str

    def excerpts(self, number: int, length: int, seed: int) -> Int[Tensor, "number length"]:
        """Drawn at random; the same for the same seed."""
        draw = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(self.ids) - length, (number,), generator=draw)
        return self.ids[starts[:, None] + torch.arange(length)]


def characters(text: str | None = None) -> Characters:
    """Of a text; of the bundled one (Moby Dick, chapters 1 to 35), where none is given.

    >>> characters("abba").ids
    tensor([0, 1, 1, 0])
    """
    if text is None:
        text = files("rankscope").joinpath("data/moby_dick.txt").read_text(encoding="utf-8")
    alphabet = "".join(sorted({*text}))
    places = {each: k for k, each in enumerate(alphabet)}
    return Characters(torch.tensor([places[each] for each in text]), alphabet)

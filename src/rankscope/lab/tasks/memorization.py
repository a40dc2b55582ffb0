"""Memorization: texts of the bundled prose with a random binary label per token, no positions.

Without positions, tokens that are equal in a text get equal outputs: there is a ceiling below one.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from rankscope.errors import LabError
from rankscope.lab.model import Interface
from rankscope.lab.tasks.sort_and_hull import FixedTask, ceiling
from rankscope.lab.tasks.task import UNLABELLED, Batch
from rankscope.sources import bundled_excerpts, split

SHORTEST = 16  # Words of a text at least: a shorter one says little about context


@dataclass(frozen=True)
class Memorization(FixedTask):
    """Memorization of random labels: asked about is what it was trained on."""

    texts: int = 500
    longest: int = 128
    seed: int = 0
    name: ClassVar[str] = "memorization"
    says: ClassVar[str] = "the random label of a word where it stands"

    @cached_property
    def words(self) -> list[list[str]]:
        """The words of every text."""
        return prose(self.texts, self.longest)

    @cached_property
    def indices(self) -> dict[str, int]:
        """The symbol of each word."""
        return {word: at for at, word in enumerate(dict.fromkeys(word for text in self.words for word in text))}

    @property
    def interface(self) -> Interface:
        """A symbol for each word."""
        return Interface(classes=2, symbols=len(self.indices))

    @cached_property
    def data(self) -> tuple[Batch, Batch]:
        """One set of samples, to learn from and to be asked about."""
        inputs = torch.zeros(self.texts, self.longest, dtype=torch.long)
        padding = torch.ones(self.texts, self.longest, dtype=torch.bool)
        for row, text in enumerate(self.words):
            inputs[row, : len(text)] = torch.tensor([self.indices[word] for word in text])
            padding[row, : len(text)] = False
        labels = torch.randint(2, inputs.shape, generator=torch.Generator().manual_seed(self.seed))
        data = Batch(inputs, labels.masked_fill(padding, UNLABELLED), padding)
        return data, data

    @cached_property
    def baselines(self) -> dict[str, float]:
        """Ceilings of who knows the word, and of who knows its text as well."""
        test = self.data[1]
        valid = test.labels != UNLABELLED
        words, labels = test.inputs[valid].tolist(), test.labels[valid].tolist()
        words_in_texts = zip(valid.nonzero()[:, 0].tolist(), words, strict=True)
        return {
            "chance": 0.5,
            "majority": ceiling([0] * len(labels), labels),
            "context-free ceiling": ceiling(words, labels),
            "ceiling": ceiling(words_in_texts, labels),
        }


def prose(texts: int, longest: int) -> list[list[str]]:
    """Texts of at most so many words, from the bundled paragraphs in their order."""
    pieces = []
    for paragraph in bundled_excerpts(words=SHORTEST):
        words = split(paragraph)
        for start in range(0, len(words), longest):
            piece = words[start : start + longest]
            if len(piece) >= SHORTEST:
                pieces.append(piece)
    if len(pieces) < texts:
        raise LabError(
            f"texts must be at most {len(pieces)}, all that the prose has of {longest} words; got {texts}",
            subject="texts",
        )
    return pieces[:texts]

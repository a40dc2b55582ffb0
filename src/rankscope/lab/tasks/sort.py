"""Sort: symbols in any order, with repetition; the label of place i is the i-th smallest."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from rankscope.lab.model import Interface
from rankscope.lab.tasks.fixed import FixedTask, LabelledSamples, agree, attention_alone
from rankscope.nets import Architecture

SYMBOLS, SORTED = 10, 8


@dataclass(frozen=True)
class Sort(FixedTask):
    """Sorting of eight symbols out of ten."""

    train: int = 1000
    test: int = 200
    seed: int = 0
    name: ClassVar[str] = "sort"
    says: ClassVar[str] = "the symbol that is here when all are sorted"

    @property
    def interface(self) -> Interface:
        """A class for each symbol."""
        return Interface(classes=SYMBOLS, symbols=SYMBOLS)

    def drawn(self) -> tuple[LabelledSamples, LabelledSamples]:
        """All symbols are equally likely."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(samples: int) -> LabelledSamples:
            symbols = torch.randint(SYMBOLS, (samples, SORTED), generator=generator)
            return LabelledSamples(symbols, symbols.sort(dim=-1).values, torch.zeros(samples, SORTED, dtype=torch.bool))

        return draw(self.train), draw(self.test)

    def guesses(self, train: LabelledSamples, test: LabelledSamples) -> dict[str, float]:
        """A guess by position is far above chance."""
        by_position = torch.stack([train.labels[:, position].mode().values for position in range(SORTED)])
        return {
            "chance": 1 / SYMBOLS,
            "majority": agree(train.labels.flatten().mode().values, test.labels),
            "majority by position": agree(by_position, test.labels),
        }

    def architecture(self, layers: int, width: int, heads: int = 2, **fields: Any) -> Architecture:
        """With a table of positions: labels are of places."""
        return attention_alone(layers, width, heads, **{"positions": "absolute", "length": SORTED, **fields})

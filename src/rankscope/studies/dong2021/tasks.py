"""The three tasks of figure 4: sort, convex hull, memorization; one label per token.

| | memorization | sort | convex hull |
|---|---|---|---|
| token | a word of a text | a symbol | a point of the plane |
| label | drawn at random, 0 or 1 | the symbol here when all are sorted | whether it is on the hull |
| evaluated on | what it was trained on | other samples | other samples |

Without positions, tokens that are equal in a text get equal outputs: memorization has a ceiling below one.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy.spatial import ConvexHull
from torch import Tensor

from rankscope.errors import StudyError
from rankscope.nets import Architecture
from rankscope.sources.words import bundled_excerpts, split

SYMBOLS, SORTED = 10, 8
POINTS, SIDE, SHIFT = 10, 10.0, 3.3
SHORTEST = 16
"""Words of a text at least: a shorter one says little about context."""


@dataclass(frozen=True, eq=False)
class Data:
    """Samples with a label per token."""

    inputs: Int[Tensor, "sample token"] | Float[Tensor, "sample token 2"]
    """Symbols, or points."""
    labels: Int[Tensor, "sample token"]
    padding: Bool[Tensor, "sample token"]

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, chosen: slice | Tensor) -> "Data":
        """Some of the samples."""
        return Data(self.inputs[chosen], self.labels[chosen], self.padding[chosen])

    def trimmed(self) -> "Data":
        """Without the padding that all samples have: padding is at the end."""
        longest = int((~self.padding).sum(1).max())
        return Data(self.inputs[:, :longest], self.labels[:, :longest], self.padding[:, :longest])

    def to(self, device: str) -> "Data":
        """The same on another device."""
        return Data(self.inputs.to(device), self.labels.to(device), self.padding.to(device))


@dataclass(frozen=True, eq=False)
class Task:
    """A network to train, what it is trained on, and what any predictor could reach."""

    name: str
    arch: Architecture
    classes: int
    train: Data
    test: Data
    """What it is evaluated on; for memorization what it was trained on."""
    baselines: dict[str, float]
    """On the test data, by name: chance, majority, and ceilings."""
    vocabulary: int = 0
    """Symbols there are; 0 where tokens are points."""
    positions: int = 0
    """Rows of the table of positions; 0 for none."""


def architecture(layers: int, heads: int, width: int) -> Architecture:
    """Attention, skips and norms: figure 4's networks have no MLP.

    Norms have no bias, and their gain stays 1: along a path the published code normalises without either.
    Values and outputs have no bias, so that every path starts at the embedding (Thm 2.1 with b = 0).
    """
    return Architecture(
        layers=layers, heads=heads, width=width, mlp="none", norm="layer", norm_place="post",
        norm_eps=1e-12, biases=("query", "key"),
    )  # fmt: skip


def sort_task(train: int = 1000, test: int = 200, seed: int = 0) -> Task:
    """Symbols in any order, with repetition; the label of place i is the i-th smallest."""
    generator = torch.Generator().manual_seed(seed)

    def draw(number: int) -> Data:
        symbols = torch.randint(SYMBOLS, (number, SORTED), generator=generator)
        return Data(symbols, symbols.sort(dim=-1).values, torch.zeros(number, SORTED, dtype=torch.bool))

    first, second = draw(train), draw(test)
    by_place = torch.stack([first.labels[:, place].mode().values for place in range(SORTED)])
    baselines = {
        "chance": 1 / SYMBOLS,
        "majority": _agree(first.labels.flatten().mode().values, second.labels),
        "majority by position": _agree(by_place, second.labels),
    }
    return Task("sort", architecture(6, 2, 48), SYMBOLS, first, second, baselines, SYMBOLS, SORTED)


def hull_task(train: int = 10000, test: int = 300, seed: int = 0) -> Task:
    """Points uniform in a square that is shifted as a whole; which of them are on their convex hull?"""
    draw = np.random.default_rng(seed)

    def samples(number: int) -> Data:
        points = draw.uniform(0, SIDE, (number, POINTS, 2)) + draw.normal(scale=SHIFT, size=(number, 1, 2))
        labels = np.stack([on_hull(each) for each in points])
        return Data(
            torch.from_numpy(points).float(),
            torch.from_numpy(labels).long(),
            torch.zeros(number, POINTS, dtype=torch.bool),
        )

    first, second = samples(train), samples(test)
    baselines = {"chance": 0.5, "majority": _agree(first.labels.flatten().mode().values, second.labels)}
    return Task("hull", architecture(6, 3, 84), 2, first, second, baselines)


def on_hull(points: Float[np.ndarray, "point 2"]) -> Bool[np.ndarray, " point"]:
    """Which points are corners of their convex hull."""
    found = np.zeros(len(points), dtype=bool)
    found[ConvexHull(points).vertices] = True
    return found


def memorization_task(texts: int = 500, longest: int = 128, width: int = 250, seed: int = 0) -> Task:
    """Texts of the bundled prose with a random binary label per token, no positions."""
    words = prose(texts, longest)
    number = {word: at for at, word in enumerate(dict.fromkeys(word for text in words for word in text))}
    inputs = torch.zeros(texts, longest, dtype=torch.long)
    padding = torch.ones(texts, longest, dtype=torch.bool)
    for row, text in enumerate(words):
        inputs[row, : len(text)] = torch.tensor([number[word] for word in text])
        padding[row, : len(text)] = False
    labels = torch.randint(2, inputs.shape, generator=torch.Generator().manual_seed(seed))
    data = Data(inputs, labels.masked_fill(padding, 0), padding)
    real = ~padding
    seen, told = inputs[real].tolist(), labels[real].tolist()
    places = zip(real.nonzero()[:, 0].tolist(), seen, strict=True)
    baselines = {
        "chance": 0.5,
        "majority": ceiling([0] * len(told), told),
        "context-free ceiling": ceiling(seen, told),
        "ceiling": ceiling(places, told),
    }
    return Task("memorization", architecture(6, 2, width), 2, data, data, baselines, vocabulary=len(number))


def prose(texts: int, longest: int) -> list[list[str]]:
    """Texts of at most so many words, from the bundled paragraphs in their order."""
    found = []
    for paragraph in bundled_excerpts(words=SHORTEST):
        words = split(paragraph)
        for start in range(0, len(words), longest):
            piece = words[start : start + longest]
            if len(piece) >= SHORTEST:
                found.append(piece)
    if len(found) < texts:
        raise StudyError(
            f"the bundled prose has {len(found)} texts of {longest} words; {texts} were asked for"
        )
    return found[:texts]


def ceiling(seen: Iterable[Hashable], labels: Iterable[int]) -> float:
    """The best accuracy of a predictor that knows no more of a token than `seen`."""
    counts: defaultdict[Hashable, Counter[int]] = defaultdict(Counter)
    for key, label in zip(seen, labels, strict=True):
        counts[key][label] += 1
    right = sum(max(here.values()) for here in counts.values())
    return right / sum(here.total() for here in counts.values())


def _agree(said: Tensor, labels: Tensor) -> float:
    return (said == labels).double().mean().item()

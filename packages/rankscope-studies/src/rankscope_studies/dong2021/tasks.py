"""The three tasks of figure 4 of Dong et al. 2021: sorting, convex hulls, memorization.

Their samples are drawn once and gone through again and again, each time in another order. `Memorization` is of texts of
the bundled prose without positions: tokens that are equal in a text get equal outputs, so that there is a ceiling below
one. `rankscope.tasks` has them by name (`TASKS`), so `forecast` and `rankscope forecast --task` know them.
"""

import math
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rankscope.errors import LabError, require
from rankscope.lab import UNLABELLED, Batch, Interface, Task, drawn_from
from rankscope.nets import Architecture
from rankscope.shapes import Bool, Float
from rankscope.sources import bundled_excerpts, split

SYMBOLS, SORTED = 10, 8  # Symbols there are to sort, and symbols of a sample
POINTS, SIDE, SHIFT = 10, 10.0, 3.3
"""Points of a hull, the side of their square, and the standard deviation of its shift."""


class FixedTask(Task):
    """A task of figure 4 of Dong et al. 2021."""

    @property
    @abstractmethod
    def data(self) -> tuple[Batch, Batch]:
        """Samples to learn from and held-out ones, drawn once."""

    @property
    @abstractmethod
    def baselines(self) -> dict[str, float]:
        """On the held-out samples, what predictors reach that know less than a network could: chance, majority,
        and ceilings."""

    def batch(self, samples: int, seed: int, step: int) -> Batch:
        """The next ones in the order of this pass through all samples; the last of a pass may be fewer."""
        data = self.data[0]
        through, within = divmod(step, math.ceil(len(data) / samples))
        order = torch.randperm(len(data), generator=drawn_from(seed, through))
        return data.part(order[within * samples : (within + 1) * samples])

    def held_out(self, samples: int) -> Batch:
        """The first of those that are asked about."""
        return self.data[1].part(slice(samples))

    def architecture(self, layers: int, width: int, heads: int = 2, **fields: Any) -> Architecture:
        """A network of attention, skips and norms."""
        return attention_alone(layers, width, heads, **fields)

    @property
    def chance(self) -> float:
        """The better of chance and of the majority."""
        return max(self.baselines["chance"], self.baselines["majority"])


@dataclass(frozen=True)
class Sort(FixedTask):
    """Sorting of eight symbols out of ten, in any order and with repetition: the label of place i is the i-th
    smallest."""

    train: int = 1000
    test: int = 200
    seed: int = 0
    name: ClassVar[str] = "sort"

    @property
    def interface(self) -> Interface:
        """A class for each symbol."""
        return Interface(classes=SYMBOLS, symbols=SYMBOLS)

    @cached_property
    def data(self) -> tuple[Batch, Batch]:
        """Samples in which all symbols are equally likely."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(samples: int) -> Batch:
            symbols = torch.randint(SYMBOLS, (samples, SORTED), generator=generator)
            return Batch(symbols, symbols.sort(dim=-1).values)

        return draw(self.train), draw(self.test)

    @cached_property
    def baselines(self) -> dict[str, float]:
        """A guess by position is far above chance."""
        train, test = (data.labels for data in self.data)
        return {
            "chance": 1 / SYMBOLS,
            "majority": agree(train.flatten().mode().values, test),
            "majority by position": agree(train.mode(0).values, test),
        }

    def architecture(self, layers: int, width: int, heads: int = 2, **fields: Any) -> Architecture:
        """With a table of positions: labels are of places."""
        return attention_alone(layers, width, heads, **{"positions": "absolute", "length": SORTED, **fields})


@dataclass(frozen=True)
class Hull(FixedTask):
    """Ten points, uniform in a square that is shifted as a whole: which are on their convex hull? They have no
    positions: their order says nothing."""

    train: int = 10000
    test: int = 300
    seed: int = 0
    name: ClassVar[str] = "hull"

    @property
    def interface(self) -> Interface:
        """Two classes: on the hull, or not."""
        return Interface(classes=2, coordinates=2)

    @cached_property
    def data(self) -> tuple[Batch, Batch]:
        """Points counted from the middle of the square, in halves of its side; the shift is normal."""
        draw = np.random.default_rng(self.seed)

        def samples(count: int) -> Batch:
            points = draw.uniform(0, SIDE, (count, POINTS, 2))
            points = points + draw.normal(scale=SHIFT, size=(count, 1, 2))
            labels = np.stack([on_hull(cloud) for cloud in points])
            return Batch(2 * torch.from_numpy(points).float() / SIDE - 1, torch.from_numpy(labels).long())

        return samples(self.train), samples(self.test)

    @cached_property
    def baselines(self) -> dict[str, float]:
        """Most points are on it."""
        train, test = (data.labels for data in self.data)
        return {"chance": 0.5, "majority": agree(train.flatten().mode().values, test)}


def on_hull(points: Float[np.ndarray, "point 2"]) -> Bool[np.ndarray, " point"]:
    """Which points are corners of their convex hull."""
    from scipy.spatial import ConvexHull

    on_corner = np.zeros(len(points), dtype=bool)
    on_corner[ConvexHull(points).vertices] = True
    return on_corner


def attention_alone(layers: int, width: int, heads: int, **fields: Any) -> Architecture:
    """Attention, skips and norms: figure 4's networks have no MLP.

    Norms have no bias: along a path the published code normalises without either gain or bias. Values and
    outputs have no bias, so that every path starts at the embedding (Thm 2.1 with b = 0).
    """
    usual: dict[str, Any] = {"mlp": "none", "norm": "layer", "norm_place": "post", "norm_eps": 1e-12}
    return Architecture(layers=layers, heads=heads, width=width, **usual | {"biases": ("query", "key")} | fields)


def ceiling(seen: Iterable[Hashable], labels: Iterable[int]) -> float:
    """The best accuracy of a predictor that knows no more of a token than `seen`."""
    counts: defaultdict[Hashable, Counter[int]] = defaultdict(Counter)
    for key, label in zip(seen, labels, strict=True):
        counts[key][label] += 1
    right = sum(max(labels_seen.values()) for labels_seen in counts.values())
    return right / sum(labels_seen.total() for labels_seen in counts.values())


def agree(guesses: Tensor, labels: Tensor) -> float:
    """The share of labels that are as guessed."""
    return (guesses == labels).double().mean().item()


SHORTEST = 16  # Words of a text at least: a shorter one says little about context


@dataclass(frozen=True)
class Memorization(FixedTask):
    """Memorization of random labels: asked about is what it was trained on."""

    texts: int = 500
    longest: int = 128
    seed: int = 0
    name: ClassVar[str] = "memorization"

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
    sentence = f"texts must be at most {len(pieces)}, all that the prose has of {longest} words; got {texts}"
    require(texts <= len(pieces), sentence, LabError, "texts")
    return pieces[:texts]


TASKS = (Sort, Hull, Memorization)
"""What the package adds to the tasks of `rankscope.lab`."""

"""Tasks on samples that are drawn once: they are gone through again and again, each time in another order."""

import math
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rankscope.lab.tasks.task import UNLABELLED, Batch, Task, drawn_from
from rankscope.nets import Architecture
from rankscope.shapes import Bool, Float, Int


@dataclass(frozen=True, eq=False)
class LabelledSamples:
    """Samples with a label per token."""

    inputs: Int[Tensor, "sample token"] | Float[Tensor, "sample token 2"]
    """Symbols, or points."""
    labels: Int[Tensor, "sample token"]
    padding: Bool[Tensor, "sample token"]

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, chosen: slice | Tensor) -> "LabelledSamples":
        """Some of the samples, by slice or indices."""
        return LabelledSamples(self.inputs[chosen], self.labels[chosen], self.padding[chosen])

    def trimmed(self) -> "LabelledSamples":
        """Without the padding that all samples have: padding is at the end."""
        longest = int((~self.padding).sum(1).max())
        return LabelledSamples(self.inputs[:, :longest], self.labels[:, :longest], self.padding[:, :longest])

    def to(self, device: str) -> "LabelledSamples":
        """These samples on another device."""
        return LabelledSamples(self.inputs.to(device), self.labels.to(device), self.padding.to(device))

    def batch(self) -> Batch:
        """A batch as tasks give it, padding unlabelled."""
        padding = self.padding if bool(self.padding.any()) else None
        return Batch(self.inputs, self.labels.masked_fill(self.padding, UNLABELLED), padding)


class FixedTask(Task):
    """A task of figure 4 of Dong et al. 2021."""

    @abstractmethod
    def drawn(self) -> tuple[LabelledSamples, LabelledSamples]:
        """Samples to learn from, and samples to be asked about."""

    @abstractmethod
    def guesses(self, train: LabelledSamples, test: LabelledSamples) -> dict[str, float]:
        """On the test data, by name: chance, majority, and ceilings."""

    @cached_property
    def data(self) -> tuple[LabelledSamples, LabelledSamples]:
        """Samples to learn from and held-out ones, drawn once."""
        return self.drawn()

    @cached_property
    def baselines(self) -> dict[str, float]:
        """What predictors reach that know less than a network could."""
        return self.guesses(*self.data)

    def batch(self, samples: int, seed: int, step: int) -> Batch:
        """The next ones in the order of this pass through all samples; the last of a pass may be fewer."""
        data = self.data[0]
        through, within = divmod(step, math.ceil(len(data) / samples))
        order = torch.randperm(len(data), generator=drawn_from(seed, through))
        return data.part(order[within * samples : (within + 1) * samples]).trimmed().batch()

    def held_out(self, samples: int) -> Batch:
        """The first of those that are asked about."""
        return self.data[1].part(slice(samples)).trimmed().batch()

    def architecture(self, layers: int, width: int, heads: int = 2, **fields: Any) -> Architecture:
        """A network of attention, skips and norms."""
        return attention_alone(layers, width, heads, **fields)

    @property
    def chance(self) -> float:
        """The better of chance and of the majority."""
        return max(self.baselines["chance"], self.baselines["majority"])


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


def agree(said: Tensor, labels: Tensor) -> float:
    """The share of labels that are as said."""
    return (said == labels).double().mean().item()

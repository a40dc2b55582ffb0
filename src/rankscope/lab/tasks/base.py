"""What a task is: samples drawn from a seed and the number of a step, a loss, and an accuracy."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from rankscope.lab.model import Interface
from rankscope.nets import Architecture
from rankscope.shapes import Bool, Int

UNLABELLED = -100  # The label of a token that has none
STEPS = 100003  # Steps of a seed's own; those of two seeds do not meet before
FREQUENT = 1024  # Samples that frequencies of labels are taken from
HELD_OUT = 2**32 - 1  # The seed of samples that no training sees: torch takes the lowest 32 bits, which are 0 in 2**61


def drawn_from(seed: int, step: int) -> torch.Generator:
    """What a step of a training is drawn with; a run that goes on from a checkpoint draws the same."""
    return torch.Generator().manual_seed(seed * STEPS + step)


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples of a task with the labels of their tokens, or of themselves."""

    inputs: Tensor  # Symbols `[sample, token]`, or numbers `[sample, token, number]`
    labels: Int[Tensor, "sample token"] | Int[Tensor, " sample"]
    """Of tokens, `UNLABELLED` where one has none, or of samples."""
    padding: Bool[Tensor, "sample token"] | None = None  # True at padded tokens; None where there are none

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, chosen: slice | Tensor) -> "Batch":
        """Some of the samples, by slice or indices, without the padding that all of them have at their end."""
        inputs, labels = self.inputs[chosen], self.labels[chosen]
        padding = None if self.padding is None else self.padding[chosen]
        if padding is None or not bool(padding.any()):
            return Batch(inputs, labels)
        longest = int((~padding).sum(1).max())
        return Batch(inputs[:, :longest], labels[:, :longest], padding[:, :longest])

    def to(self, device: torch.device | str) -> "Batch":
        """These samples on another device."""
        padding = None if self.padding is None else _moved(self.padding, device)
        return Batch(_moved(self.inputs, device), _moved(self.labels, device), padding)


def _moved(x: Tensor, device: torch.device | str) -> Tensor:
    """To a GPU from memory that stays where it is, so that nobody waits for the copy."""
    if x.device.type == "cpu" and torch.device(device).type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


class Task(ABC):
    """A task for small networks; those here are frozen dataclasses of their sizes."""

    name: ClassVar[str]
    context: int  # Tokens of a sample, where `architecture` is not the task's own

    @property
    @abstractmethod
    def interface(self) -> Interface:
        """What a token is, and what is said of it."""

    @abstractmethod
    def batch(self, samples: int, seed: int, step: int) -> Batch:
        """Samples to learn from, the same for the same seed and step."""

    @abstractmethod
    def held_out(self, samples: int) -> Batch:
        """Samples to be asked about, always the same; of a task that is about memory, those learnt from."""

    def architecture(self, layers: int, width: int, heads: int = 4, **fields: Any) -> Architecture:
        """The network that it wants at a depth and width; `fields` are in place of its own. If a task does not say
        otherwise, a decoder as GPT-2 is: pre-norm, causal, with a table of positions and a last norm."""
        usual: dict[str, Any] = {
            "mask": "causal", "norm_place": "pre", "norm_eps": 1e-5, "final_norm": True, "positions": "absolute",
        }  # fmt: skip
        length = {} if "length" in fields else {"length": self.context}
        return Architecture(layers=layers, width=width, heads=heads, **usual | length | fields)

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy of the labels, in nats, on average."""
        return F.cross_entropy(logits.flatten(0, -2), batch.labels.flatten(), ignore_index=UNLABELLED)

    def accuracy(self, logits: Tensor, batch: Batch) -> Tensor:
        """The share of labels that are said rightly."""
        labelled = batch.labels != UNLABELLED
        right = (logits.argmax(-1) == batch.labels) & labelled
        return right.sum() / labelled.sum()

    @property
    @abstractmethod
    def chance(self) -> float:
        """The accuracy of the best guess that does not look at the inputs, or what it tends to."""

    @property
    def blind(self) -> float:
        """The held-out loss of who knows how frequent each label is, and does not look at the inputs: where a
        network stays that learns nothing of them."""
        learnt, held = self.batch(FREQUENT, 0, 0).labels, self.held_out(FREQUENT).labels.flatten()
        counts = torch.bincount(learnt[learnt != UNLABELLED], minlength=self.interface.classes) + 1.0
        logs = (counts / counts.sum()).log().expand(len(held), -1)
        return float(F.nll_loss(logs, held, ignore_index=UNLABELLED))

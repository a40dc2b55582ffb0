"""The three tasks of figure 4 (`lab/tasks/`) with the networks that the figure has for them.

| | memorization | sort | convex hull |
|---|---|---|---|
| token | a word of a text | a symbol | a point of the plane |
| label | drawn at random, 0 or 1 | the symbol here when all are sorted | whether it is on the hull |
| evaluated on | what it was trained on | other samples | other samples |

Without positions, tokens that are equal in a text get equal outputs: memorization has a ceiling below one.
"""

from dataclasses import dataclass

from rankscope.lab.tasks import Hull, Memorization, Sort
from rankscope.lab.tasks.fixed import Data, Fixed, attention_alone, ceiling
from rankscope.lab.tasks.hull import on_hull
from rankscope.lab.tasks.memorization import prose
from rankscope.lab.tasks.sort import SORTED
from rankscope.nets import Architecture

__all__ = [
    "Data", "Task", "architecture", "ceiling", "hull_task", "memorization_task", "on_hull", "prose",
    "sort_task",
]  # fmt: skip


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
    """Attention, skips and norms, without positions: those are added before the norm of the embedding. The
    gain of norms stays 1."""
    return attention_alone(layers, width, heads)


def sort_task(train: int = 1000, test: int = 200, seed: int = 0) -> Task:
    """Symbols in any order, with repetition; the label of place i is the i-th smallest."""
    return _task(Sort(train, test, seed), architecture(6, 2, 48), SORTED)


def hull_task(train: int = 10000, test: int = 300, seed: int = 0) -> Task:
    """Points uniform in a square that is shifted as a whole; which of them are on their convex hull?"""
    return _task(Hull(train, test, seed), architecture(6, 3, 84))


def memorization_task(texts: int = 500, longest: int = 128, width: int = 250, seed: int = 0) -> Task:
    """Texts of the bundled prose with a random binary label per token, no positions."""
    return _task(Memorization(texts, longest, seed), architecture(6, 2, width))


def _task(task: Fixed, arch: Architecture, positions: int = 0) -> Task:
    asked = task.interface
    return Task(task.name, arch, asked.classes, *task.data, task.baselines, asked.symbols, positions)

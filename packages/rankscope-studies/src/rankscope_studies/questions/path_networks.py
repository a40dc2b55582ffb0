"""What the questions on paths share: sizes, figure 4's tasks and networks, held-out samples, and readings by length.

`long_paths.py`, `using_paths.py` and `number_or_length.py` ask these questions.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import polars as pl
import torch
from torch import Tensor

from rankscope.errors import ClosureError, StudyError, one_of
from rankscope.lab import HELD_SHARE, Batch, NextCharacter, Recipe, Task
from rankscope.nets import Architecture, Transformer
from rankscope.paths import by_length, freeze
from rankscope.shapes import Float
from rankscope_studies.dong2021.fig4 import PublishedSort
from rankscope_studies.dong2021.tasks import POINTS, SORTED, FixedTask, Hull
from rankscope_studies.path_model import EPS, Stack

TITLES = {"sort": "Sorting", "hull": "Convex hull", "text": "Text"}
SCHEMES = {"sort": "kaiming", "hull": "kaiming", "text": "xavier"}  # Of initial weights: figure 4's, and the lab's
HELD = 2000  # Held-out samples of sort and hull: enough to evaluate on some and to fit readouts to others
TINY = 1e-17  # A relative residual below is written so
TOLD = 0.05  # Accuracy that attention must add, with every seed, for a task to tell anything
CHANCE = 0.05  # What would be seen by chance more often than this is not believed


@dataclass(frozen=True)
class PathSizes:
    """The sizes that all questions on paths have."""

    tasks: tuple[str, ...]
    first_seed: int  # Seeds are every other number from here on: a network's embedding is drawn with its seed + 1
    seeds: int  # Networks of each task
    layers: int

    @property
    def networks(self) -> range:
        """The seeds of the networks of a task."""
        return range(self.first_seed, self.first_seed + 2 * self.seeds, 2)

    @property
    def long(self) -> int:
        """The length from which on paths count as long: half of the layers, 3 of 6 as in figure 4."""
        return math.ceil(self.layers / 2)


@dataclass(frozen=True)
class PathTrainingSizes(PathSizes):
    """The sizes of trainings on sums of paths. `widths` to `rates` have one number for each task."""

    widths: tuple[int, ...]
    heads: tuple[int, ...]
    steps: tuple[int, ...]
    batches: tuple[int, ...]
    rates: tuple[float, ...]
    context: int  # Characters of a sample of text
    samples: int  # Samples of hulls to learn from
    evaluation_samples: int
    probe_samples: int  # Samples that shares of lengths, and residuals, are read on

    def task(self, name: str) -> Task:
        """The task of a name, with the context and samples of these sizes."""
        return path_task(name, self.context, self.samples)

    def architecture(self, name: str, **fields: Any) -> Architecture:
        """Attention, skips and norms: post-norm as in figure 4, a pre-norm decoder for text; no bias adds to tokens."""
        index = self.tasks.index(name)
        if name == "text":
            fields = {"mlp": "none", "biases": ("query", "key"), "norm_eps": 1e-12} | fields
        return self.task(name).architecture(self.layers, self.widths[index], self.heads[index], **fields)

    def recipe(self, name: str, factor: float = 1.0) -> Recipe:
        """Figure 4's recipe with the steps, batches and learning rate of a task, the rate times `factor`."""
        index = self.tasks.index(name)
        return Recipe(
            steps=self.steps[index], batch_size=self.batches[index], lr=factor * self.rates[index], weight_decay=0.0,
            frozen=("gain",),
        )  # fmt: skip

    def title(self, name: str) -> str:
        """The beginning of a table's title: a task, and the networks that learnt it."""
        index = self.tasks.index(name)
        return (
            f"{name}: {self.layers} layers, width {self.widths[index]}, {self.heads[index]} heads, {self.steps[index]} "
            f"steps; held-out accuracy"
        )


@lru_cache(maxsize=8)
def path_task(name: str, context: int, samples: int) -> Task:
    """The task of a name; asked for again, it is the same object, which draws its samples once.

    Args:
        name: A key of `TITLES`.
        context: Characters of a sample of text.
        samples: Samples of hulls to learn from.
    """
    made: dict[str, Callable[[], Task]] = {
        "sort": lambda: PublishedSort(test=HELD),
        "hull": lambda: Hull(samples, HELD),
        "text": lambda: NextCharacter(context),
    }
    if name not in made:
        raise StudyError(one_of("task", name, made), subject="task")
    return made[name]()


def held_out_samples(task: Task, test: int, fit: int) -> tuple[Batch, Batch]:
    """Held-out samples to evaluate on, and others to fit readouts to; no network has learnt from either.

    The held-out tenth of a text is cut in two: readouts are fitted to excerpts of its first half, and evaluated on
    excerpts of its second half, spaced evenly.

    Args:
        task: A text, or a task with samples that are drawn once.
        test: Samples to evaluate on.
        fit: Samples to fit readouts to.

    Raises:
        StudyError: The task has fewer held-out samples, or none that could be cut in two.
    """
    if isinstance(task, NextCharacter):
        held = round(HELD_SHARE * len(task.ids))
        halves = task.ids[-held : -held // 2], task.ids[-held // 2 :]
        return _excerpts(halves[1], test, task.context), _excerpts(halves[0], fit, task.context)
    if not isinstance(task, FixedTask) or len(task.data[1]) < test + fit:
        wanted = f"the task must have {test} + {fit} held-out samples"
        raise StudyError(f"{wanted}; got {task}", subject="task")
    return task.data[1].part(slice(test)), task.data[1].part(slice(test, test + fit))


def _excerpts(ids: Tensor, samples: int, context: int) -> Batch:
    starts = torch.linspace(0, len(ids) - context - 1, samples).long()
    excerpts = ids[starts[:, None] + torch.arange(context + 1)]
    return Batch(excerpts[:, :-1], excerpts[:, 1:])


def even_attention(name: str, context: int) -> float:
    """The mean of the diagonal of an attention pattern that is even over all tokens that a token sees."""
    if name == "text":
        return sum(1 / seen for seen in range(1, context + 1)) / context
    return 1 / {"sort": SORTED, "hull": POINTS}[name]


def shares(net: Transformer, X: Tensor) -> list[float]:
    """The share of the output that paths of each length are, mean of samples; NaN where the terms do not add up."""
    return _mean_by_length(net, X, pl.col("share"))


def size_shares(terms: Stack) -> Float[Tensor, "length batch token"]:
    """The norm of each length's sum as a share of the norms of all, `|Y_k| / sum_j |Y_j|`, token by token.

    Unlike the share of the output, `<Y_k, Y> / <Y, Y>`, it is never negative: terms that cancel do not make it small.
    """
    norms = (terms.square().sum(-1) + EPS).sqrt()
    return norms / norms.sum(0)


def mean_sizes(net: Transformer, X: Tensor) -> list[float]:
    """The `size_shares` of each length, mean of tokens and samples; NaN where the terms do not add up."""
    try:
        lengths = by_length(freeze(net.to(torch.float64), X.double()))
    except ClosureError:
        return [math.nan] * (net.arch.layers + 1)
    return [float(size) for size in size_shares(lengths.embedding + lengths.bias).mean((1, 2))]


def residuals(net: Transformer, X: Tensor) -> list[float]:
    """The log10 of the relative residual of each length's sum, mean of samples; NaN of a length without paths."""
    log10 = pl.col("relative_residual").clip(TINY).log10()
    return _mean_by_length(net, X, pl.when(pl.col("paths") == "0").then(math.nan).otherwise(log10))


def _mean_by_length(net: Transformer, X: Tensor, quantity: pl.Expr) -> list[float]:
    try:
        table = by_length(freeze(net.to(torch.float64), X.double())).table.filter(start="all")
    except ClosureError:
        return [math.nan] * (net.arch.layers + 1)
    return table.group_by("length").agg(quantity.mean().alias("mean")).sort("length")["mean"].to_list()


def self_attention(net: Transformer, X: Tensor) -> float:
    """The mean of the diagonal of the attention pattern, over samples, layers, heads and tokens."""
    layers = freeze(net.to(torch.float64), X.double()).layers
    return float(torch.stack([layer.P.diagonal(dim1=-2, dim2=-1).mean() for layer in layers]).mean())


# ---- Verdicts


def attention_gains(full: Sequence[float], alone: Sequence[float]) -> list[float]:
    """What attention adds to the accuracy of a task, for each seed; empty where a task does not tell.

    Args:
        full: Accuracies of networks with attention, one for each seed.
        alone: Accuracies of the same seeds where each token is read alone.
    """
    gains = [accuracy - token for accuracy, token in zip(full, alone, strict=True)] if len(full) == len(alone) else []
    return gains if gains and min(gains) >= TOLD else []


def judged(cases: Mapping[Any, Sequence[bool]]) -> bool | None:
    """True if all cases of every group, such as a task, hold; False if all of some group fail; otherwise None."""
    if any(outcomes and not any(outcomes) for outcomes in cases.values()):
        return False
    return True if cases and all(outcomes and all(outcomes) for outcomes in cases.values()) else None

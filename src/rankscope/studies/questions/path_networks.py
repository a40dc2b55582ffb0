"""What the questions on paths share: figure 4's tasks and networks, held-out samples, and readings by length."""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import polars as pl
import torch
from torch import Tensor

from rankscope.errors import ClosureError, StudyError, one_of
from rankscope.lab import Batch, Task
from rankscope.lab.tasks import Hull, NextCharacter
from rankscope.lab.tasks.next_character import HELD_SHARE
from rankscope.lab.tasks.sort_and_hull import POINTS, SORTED, FixedTask
from rankscope.nets import Architecture, Transformer
from rankscope.paths.frozen import freeze
from rankscope.paths.lengths import by_length
from rankscope.studies.dong2021.fig4 import PublishedSort

TASKS = ("sort", "hull", "text")
TITLES = {"sort": "Sorting", "hull": "Convex hull", "text": "Text"}
SCHEMES = {"sort": "kaiming", "hull": "kaiming", "text": "xavier"}  # Of initial weights: figure 4's, and the lab's
HELD = 2000  # Held-out samples of sort and hull: enough to evaluate on some and to fit readouts to others
TINY = 1e-17  # A relative residual below is written so


@lru_cache(maxsize=8)
def path_task(name: str, context: int, samples: int) -> Task:
    """The task of a name; asked for again, it is the same object, which draws its samples once.

    Args:
        name: One of `TASKS`.
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


def attention_network(name: str, task: Task, layers: int, width: int, heads: int, **fields: Any) -> Architecture:
    """Attention, skips and norms: post-norm as in figure 4, a pre-norm decoder for text; no bias adds to tokens."""
    if name == "text":
        fields = {"mlp": "none", "biases": ("query", "key"), "norm_eps": 1e-12} | fields
    return task.architecture(layers, width, heads, **fields)


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


def residuals(net: Transformer, X: Tensor) -> list[float]:
    """The log10 of the relative residual of each length's sum, mean of samples; NaN of a length without paths."""
    log10 = pl.col("relative_residual").clip(TINY).log10()
    return _mean_by_length(net, X, pl.when(pl.col("paths") == "0").then(math.nan).otherwise(log10))


def _mean_by_length(net: Transformer, X: Tensor, number: pl.Expr) -> list[float]:
    try:
        table = by_length(freeze(net.to(torch.float64), X.double())).table.filter(start="all")
    except ClosureError:
        return [math.nan] * (net.arch.layers + 1)
    return table.group_by("length").agg(number.mean().alias("mean")).sort("length")["mean"].to_list()


def self_attention(net: Transformer, X: Tensor) -> float:
    """The mean of the diagonal of the attention pattern, over samples, layers, heads and tokens."""
    layers = freeze(net.to(torch.float64), X.double()).layers
    return float(torch.stack([layer.P.diagonal(dim1=-2, dim2=-1).mean() for layer in layers]).mean())

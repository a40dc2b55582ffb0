"""What the questions on paths share: figure 4's tasks and networks, heads fitted anew, and readings by length."""

import math
from collections.abc import Callable
from typing import Any

import polars as pl
import torch
from torch import Tensor
from torch.nn import functional as F

from rankscope.errors import ClosureError, StudyError, one_of
from rankscope.lab import Batch, Task
from rankscope.lab.tasks import Hull, NextCharacter
from rankscope.nets import Architecture, Transformer
from rankscope.paths.frozen import freeze
from rankscope.paths.lengths import by_length
from rankscope.studies.dong2021.fig4 import PublishedSort

TASKS = ("sort", "hull", "text")
TITLES = {"sort": "Sorting", "hull": "Convex hull", "text": "Text"}
SCHEMES = {"sort": "kaiming", "hull": "kaiming", "text": "xavier"}  # Of initial weights: figure 4's, and the lab's
HEAD_PENALTY, HEAD_STEPS = 1e-4, 100
"""Of a new head: the weight of its squared norm in its loss, and iterations of L-BFGS."""
TINY = 1e-17  # A relative residual below is written so


def path_task(name: str, context: int, samples: int) -> Task:
    """The task of a name.

    Args:
        name: One of `TASKS`.
        context: Characters of a sample of text.
        samples: Samples of hulls to learn from.
    """
    made: dict[str, Callable[[], Task]] = {
        "sort": PublishedSort, "hull": lambda: Hull(samples), "text": lambda: NextCharacter(context),
    }  # fmt: skip
    if name not in made:
        raise StudyError(one_of("task", name, made), subject="task")
    return made[name]()


def attention_network(name: str, task: Task, layers: int, width: int, heads: int, **fields: Any) -> Architecture:
    """Attention, skips and norms: post-norm as in figure 4, a pre-norm decoder for text; no bias adds to tokens."""
    if name == "text":
        fields = {"mlp": "none", "biases": ("query", "key"), "norm_eps": 1e-12} | fields
    return task.architecture(layers, width, heads, **fields)


def fitted_head(Y: Tensor, batch: Batch, classes: int) -> Tensor:
    """The linear head `[width + 1, class]` of least cross-entropy on tokens Y, with a small penalty on its norm."""
    X, labels = with_ones(Y.detach()).flatten(0, -2), batch.labels.flatten()
    W = torch.zeros(X.shape[1], classes, dtype=X.dtype, device=X.device, requires_grad=True)
    search = torch.optim.LBFGS([W], max_iter=HEAD_STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        search.zero_grad()
        value = F.cross_entropy(X @ W, labels) + HEAD_PENALTY * W.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    search.step(loss)  # type: ignore[no-untyped-call]
    return W.detach()


def with_ones(Y: Tensor) -> Tensor:
    """Tokens with one more entry, 1, for the bias of a head."""
    return torch.cat([Y, torch.ones_like(Y[..., :1])], -1)


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
    """What tokens give themselves in attention, mean of samples, layers, heads and tokens."""
    layers = freeze(net.to(torch.float64), X.double()).layers
    return float(torch.stack([layer.P.diagonal(dim1=-2, dim2=-1).mean() for layer in layers]).mean())

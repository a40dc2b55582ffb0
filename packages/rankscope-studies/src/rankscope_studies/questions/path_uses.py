"""Networks that are trained to use their paths: lengths dropped or weighted at random, lengths with a penalty; and what
is left of their accuracy when something is taken away at test time. `using_paths.py` asks the question.

All noise is multiplicative with mean 1 and variance `p / (1 - p)`, that of ordinary dropout at chance p. Its strengths
are still not comparable: in L layers ordinary dropout acts at 2L + 2 places, noise on lengths at one, before the head;
ordinary dropout is trained at several chances for that reason, a weak one among them. The weights of lengths are drawn
anew for every sample and step; a length's sum goes times its weight, and the head reads the normalised sum
(`path_model.py`).
"""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor
from torch.nn import functional as F

from rankscope.errors import StudyError, one_of
from rankscope.lab import Batch, Initialisation, Interface, Model, Task, Training, release_memory
from rankscope.metrics import relative_residual
from rankscope.nets import Dropout, Transformer
from rankscope.shapes import Bool, Float
from rankscope_studies.path_model import EPS, PathModel
from rankscope_studies.questions.path_networks import SCHEMES, PathTrainingSizes, held_out_samples, shares, size_shares

PLAIN, ALONE, DROPOUT = "plain", "token by token", "dropout"
PATH_DROPOUT, DIVERSE = "path dropout", "diverse lengths"
SHORT_PENALTY, LONG_PENALTY = "penalty on short", "penalty on long"
NOISES, PENALTIES = (PATH_DROPOUT, DIVERSE), (SHORT_PENALTY, LONG_PENALTY)
KINDS = (PLAIN, ALONE, DROPOUT, *NOISES, *PENALTIES)
NOISE = 0.5  # Of embeddings at test time: standard deviation as a share of the tokens' root mean square
HEADS_OUT, DRAWS = 0.25, 8  # The share of heads that is removed at test time, and how many draws of heads are tried
SEED = 2**40  # Of what is drawn here, apart from the seeds of samples and weights
ROWS = {
    "task": pl.String, "kind": pl.String, "strength": pl.Float64, "seed": pl.Int64, "quantity": pl.String,
    "at": pl.Int64, "value": pl.Float64,
}  # fmt: skip


@dataclass(frozen=True)
class Use:
    """One way to train: a kind, and its strength.

    The strength of a noise is the chance p whose variance it has; that of a penalty is nats per share of the output.
    """

    kind: str = PLAIN
    strength: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise StudyError(one_of("kind", self.kind, KINDS), subject="kind")
        if self.kind not in PENALTIES and not 0 <= self.strength < 1:
            raise StudyError(f"a chance must be from 0 to below 1; got {self.strength}", subject="strength")

    @property
    def label(self) -> str:
        """The kind with its strength, if it has one."""
        return f"{self.kind} {self.strength:g}" if self.strength else self.kind


@dataclass(frozen=True)
class UseSizes(PathTrainingSizes):
    """How large the experiment is."""

    dropouts: tuple[float, ...]  # Strengths of ordinary dropout
    chances: tuple[float, ...]  # Strengths of path dropout and diverse lengths
    penalties: tuple[float, ...]  # Nats for all of the output

    @property
    def controls(self) -> list[Use]:
        """What a gain must be one over: plain training, and ordinary dropout."""
        return [Use(), *(Use(DROPOUT, p) for p in self.dropouts)]

    @property
    def uses(self) -> list[Use]:
        """Every use of paths, at each strength."""
        return [
            *(Use(kind, p) for kind in NOISES for p in self.chances),
            *(Use(kind, penalty) for kind in PENALTIES for penalty in self.penalties),
        ]


class PathUseModel(PathModel):
    """A model whose lengths are weighted anew at each step of a training, or have a penalty.

    In evaluation it is a `PathModel`. In training, lengths go times `weights`, a buffer `[length, sample]` that is
    changed between steps; with a penalty the logits have one more column, the penalty of each token. With dropout it is
    a plain `Model`, which computes the same where all lengths are read and the network ends in a norm.

    Args:
        net: The network between embedding and head; the module has a copy of its weights.
        task: What a token is, and how many classes there are.
        std: Standard deviation of the entries of embedding and positions; `1 / sqrt(width)` if left out.
        seed: Decides embedding, positions and head.
        lengths: The weight of each length from 0 on, as of `PathModel`.
        samples: The largest number of samples of a step.
        penalties: The penalty of each length from 0 on, in nats per share; none if left out.
    """

    weights: Tensor
    penalties: Tensor

    def __init__(
        self, net: Transformer, task: Interface, std: float | None = None, seed: int = 0, *,
        lengths: Sequence[float], samples: int, penalties: Sequence[float] = (),
    ) -> None:  # fmt: skip
        super().__init__(net, task, std, seed, lengths=lengths)
        self.has_penalty = bool(penalties)
        self.register_buffer("weights", self.lengths[:, None].repeat(1, samples))
        self.register_buffer("penalties", torch.tensor(penalties, dtype=net.dtype, device=net.device))

    def forward(
        self, inputs: Tensor, padding: Bool[Tensor, "batch token"] | None = None, drop: Dropout | None = None
    ) -> Tensor:
        """Logits; in training with a penalty, one more column has the penalty of each token."""
        if drop is not None:
            return Model.forward(self, inputs, padding, drop)
        if not self.training:
            return super().forward(inputs, padding)
        terms = self.terms(inputs, padding)
        Y = torch.einsum("kb,kbtd->btd", self.weights[:, : terms.shape[1]], terms)
        logits = self.logits(F.layer_norm(Y, Y.shape[-1:], eps=EPS), padding)
        if not self.has_penalty:
            return logits
        penalty = torch.einsum("k,kbt->bt", self.penalties, size_shares(terms))
        return torch.cat([logits, penalty[..., None]], -1)


class PathUseTraining(Training):
    """A training whose loss has the penalty that models add as a last column; all else is `Training`."""

    def _batch_losses(self, batches: Sequence[Batch], drops: Sequence[Dropout | None] | None = None) -> Tensor:
        classes = self.task.interface.classes
        outputs = self.learner.logits(batches, drops or [None] * len(batches))
        losses = []
        for output, batch in zip(outputs, batches, strict=True):
            loss = self.task.loss(output[..., :classes], batch)
            losses.append(loss + output[..., classes].mean() if output.shape[-1] > classes else loss)
        return torch.stack(losses)


def drawn_weights(use: Use, lengths: int, samples: int, steps: int, seed: int) -> Float[Tensor, "step length sample"]:
    """The weights of lengths at every step, each of mean 1 and variance `v = p / (1 - p)`, up to draws left out.

    Path dropout: 0 or a constant; draws in which all lengths of a sample are 0 are drawn again, and the constant is
    such that the mean is 1 all the same. Diverse lengths: Gamma of shape 1 / v. As the sum is normalised, these are
    distributions over lengths from Dirichlet's with that parameter: at p = 0.5 all are equally likely.
    """
    shape, p, draw = (steps, lengths, samples), use.strength, np.random.default_rng([SEED, seed])
    if use.kind not in NOISES or p == 0:
        return torch.ones(shape)
    if use.kind == DIVERSE:
        variance = p / (1 - p)
        drawn = draw.gamma(1 / variance, variance, shape)
        return torch.from_numpy(drawn).float()
    left = draw.random(shape) >= p
    while (empty := ~left.any(1)).any():
        step, sample = empty.nonzero()
        left[step, :, sample] = draw.random((len(step), lengths)) >= p
    return torch.from_numpy(left).float() * ((1 - p**lengths) / (1 - p))


def training_of(name: str, use: Use, sizes: UseSizes, seeds: Sequence[int], device: str = "cpu") -> Training:
    """The training of some seeds with a use of paths, before its first step."""
    task, arch, recipe = sizes.task(name), sizes.architecture(name), sizes.recipe(name)
    lengths = range(sizes.layers + 1)
    penalised = {SHORT_PENALTY: [k < sizes.long for k in lengths], LONG_PENALTY: [k >= sizes.long for k in lengths]}
    model = partial(
        PathUseModel, lengths=[float(use.kind != ALONE or k == 0) for k in lengths], samples=recipe.batch_size,
        penalties=[use.strength * chosen for chosen in penalised.get(use.kind, [])],
    )  # fmt: skip
    start = Initialisation(SCHEMES[name], 1.0, dropout=use.strength if use.kind == DROPOUT else 0.0)
    return PathUseTraining(
        task, arch, recipe, seeds=seeds, device=device, initialisation=start, capture=True, model=model
    )


def finish_training(training: Training, use: Use) -> None:
    """Make all steps, with weights of lengths that are drawn for each."""
    models: list[Any] = training.models
    lengths, samples = models[0].weights.shape
    noisy = use.kind in NOISES
    drawn = [
        drawn_weights(use, lengths, samples, training.recipe.steps if noisy else 0, seed).to(training.device)
        for seed in training.seeds
    ]

    def put(step: int) -> None:
        if noisy and step < training.recipe.steps:
            for model, weights in zip(models, drawn, strict=True):
                model.weights.copy_(weights[step])

    put(training.steps)
    for step in training:
        put(step)


# ---- What is left at test time


def trained(task: str, use: Use, sizes: UseSizes, seeds: Sequence[int], device: str = "cpu") -> pl.DataFrame:
    """Train some seeds of a use; rows of one number each: task · kind · strength · seed · quantity · at · value.

    | quantity           | what it is, on held-out samples                                   | `at`   |
    |--------------------|-------------------------------------------------------------------|--------|
    | `loss`, `accuracy` | with all in place                                                 |        |
    | `noise`            | accuracy with noise on the embedding                              |        |
    | `heads`            | accuracy without some heads                                       | draw   |
    | `layers`           | accuracy without a layer                                          | layer  |
    | `length out`       | accuracy without the paths of a length                            | length |
    | `one length`       | accuracy of the paths of a length alone                           | length |
    | `share`            | of the output, by length                                          | length |
    | `size`             | share of the norms of all lengths, which penalties are on         | length |
    | `residual`         | relative residual of tokens after the last layer, mean of samples |        |
    """
    training, rows = training_of(task, use, sizes, seeds, device), []
    try:
        finish_training(training, use)
        batch = held_out_samples(training.task, sizes.evaluation_samples, 1)[0].to(device)
        for seed, model in zip(seeds, training.models, strict=True):
            for row in evaluation_rows(model, training.task, batch, sizes.probe_samples):
                rows.append((task, use.kind, use.strength, seed, *row))
    finally:
        del training
        release_memory(device)
    return pl.DataFrame(rows, schema=ROWS, orient="row")


@torch.no_grad()
def evaluation_rows(
    model: Model, task: Task, batch: Batch, probe_samples: int
) -> Iterator[tuple[str, int | None, float]]:
    """(quantity, at, value) of one trained network; `trained` says what each quantity is.

    Args:
        model: The trained network with its embedding and head. One that does not read all lengths alike gives its loss
            and accuracy alone.
        task: What it was trained on.
        batch: Held-out samples.
        probe_samples: How many of these samples shares of lengths are read on.
    """
    precise = copy.deepcopy(model).double().eval()
    assert isinstance(precise, PathModel)
    net, X = precise.network(), precise.tokens(batch.inputs)

    def accuracy(logits: Tensor) -> float:
        return float(task.accuracy(logits, batch))

    def accuracy_of(changed: Transformer, tokens: Tensor) -> float:
        return accuracy(precise.logits(changed.run(tokens).output, None))

    terms = precise.terms(batch.inputs)
    selections = torch.eye(net.arch.layers + 1, dtype=torch.float64, device=X.device)
    logits = precise(batch.inputs)
    yield "loss", None, float(task.loss(logits, batch))
    yield "accuracy", None, accuracy(logits)
    if not bool((precise.lengths == 1).all()):
        return  # what follows is of networks that read all lengths
    noise = np.random.default_rng(SEED).standard_normal(X.shape)
    yield "noise", None, accuracy_of(net, X + NOISE * X.square().mean().sqrt() * torch.from_numpy(noise).to(X))
    for draw, heads in enumerate(heads_out(net.arch.layers, net.arch.heads)):
        yield "heads", draw, accuracy_of(net.without(heads=heads), X)
    for layer in range(1, net.arch.layers + 1):
        yield "layers", layer, accuracy_of(net.without(layers=[layer]), X)
    for length, alone in enumerate(selections):
        yield "length out", length, accuracy(precise.read(terms, precise.lengths - alone))
        yield "one length", length, accuracy(precise.read(terms, alone))
    for length, size in enumerate(size_shares(terms).mean((1, 2)).tolist()):
        yield "size", length, size
    *_, last = net.steps(X)
    yield "residual", None, float(relative_residual(last.state).mean())
    for length, value in enumerate(shares(net, X[:probe_samples])):
        yield "share", length, value


def heads_out(layers: int, heads: int) -> list[dict[int, list[int]]]:
    """Draws of heads to remove, by layer from 1 on: the same for every network of a size."""
    draw, count = np.random.default_rng(SEED), math.ceil(HEADS_OUT * layers * heads)
    chosen = [draw.choice(layers * heads, count, replace=False) for _ in range(DRAWS)]
    removed: list[dict[int, list[int]]] = []
    for numbers in chosen:
        layer_heads: dict[int, list[int]] = {}
        for head in sorted(int(head) for head in numbers):
            layer_heads.setdefault(head // heads + 1, []).append(head % heads)
        removed.append(layer_heads)
    return removed

"""Train figure 4's networks: an input map, the canonical network, a linear head.

The tensors of all three are one flat mapping; the network itself is `Transformer.from_weights` of those named
`net.*`, in training as in evaluation; dropout, where there is some, is in training alone. Everything is drawn
from the seed, an epoch's order and its dropout from the seed and its number: a run that goes on from a
checkpoint gives what an unbroken one gives.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from rankscope import lab
from rankscope.files import atomic
from rankscope.lab.loop import looped
from rankscope.nets import Transformer
from rankscope.nets.dropout import Dropout, training_states
from rankscope.nets.initial import random_tensors
from rankscope.shapes import Float
from rankscope.studies.dong2021.tasks import Data, Task

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Recipe:
    """How a network is trained: Adam, a warm-up, then a cosine down to nothing."""

    epochs: int
    batch: int
    rate: float
    warmup: float = 0.05
    """The share of all steps in which the rate rises."""
    decay: float = 0.0
    """Decoupled weight decay."""
    dropout: float = 0.0
    """The chance that an entry is zero in training: of the embedding, of the attention weights, of what heads
    add, and of what the head reads."""
    spread: float = 1.0
    """Of the embedding at first; a norm follows, so a smaller one learns faster."""
    init: str = "kaiming"
    clip: float = 1.0
    """The longest gradient."""
    seed: int = 0
    keep_every: int = 10
    """Epochs between checkpoints."""


def initial(task: Task, recipe: Recipe) -> Tensors:
    """Tensors to start from; gains of norms are ones and stay so."""
    width = task.arch.width
    draw = torch.Generator().manual_seed(recipe.seed + 1)

    def normal(*shape: int, spread: float) -> Tensor:
        return spread * torch.randn(shape, generator=draw, dtype=torch.float64)

    tensors = {
        f"net.{name}": each for name, each in random_tensors(task.arch, recipe.seed, recipe.init).items()
    }
    if task.vocabulary:
        tensors["input.symbols"] = normal(task.vocabulary, width, spread=recipe.spread)
    else:
        tensors["input.first"] = normal(2, width, spread=1 / math.sqrt(2))
        tensors["input.first_bias"] = normal(width, spread=1.0)
        tensors["input.second"] = normal(width, width, spread=math.sqrt(2 / width))
        tensors["input.second_bias"] = torch.zeros(width, dtype=torch.float64)
    if task.positions:
        tensors["input.positions"] = normal(task.positions, width, spread=recipe.spread)
    tensors["head.weight"] = normal(width, task.classes, spread=1 / math.sqrt(width))
    tensors["head.bias"] = torch.zeros(task.classes, dtype=torch.float64)
    return {name: each.float() for name, each in tensors.items()}


def embed(task: Task, tensors: Tensors, data: Data) -> Float[Tensor, "sample token width"]:
    """Layer 0: symbols and positions, or points through two layers; then a norm."""
    if task.vocabulary:
        X = F.embedding(data.inputs, tensors["input.symbols"])
    else:
        scaled = data.inputs.to(tensors["input.first"].dtype) / 5 - 1  # the square is 10 wide
        X = F.relu(scaled @ tensors["input.first"] + tensors["input.first_bias"])
        X = X @ tensors["input.second"] + tensors["input.second_bias"]
    if task.positions:
        X = X + tensors["input.positions"][: X.shape[1]]
    return F.layer_norm(X, X.shape[-1:], eps=task.arch.norm_eps)


def network(task: Task, tensors: Tensors) -> Transformer:
    """The canonical network on the trained tensors."""
    mine = {name.removeprefix("net."): each for name, each in tensors.items() if name.startswith("net.")}
    return Transformer.from_weights(task.arch, mine)


def classify(tensors: Tensors, X: Float[Tensor, "*rest width"]) -> Float[Tensor, "*rest classes"]:
    """The trained head on normalised tokens."""
    return X @ tensors["head.weight"] + tensors["head.bias"]


def logits(
    task: Task, tensors: Tensors, data: Data, drop: Dropout | None = None
) -> Float[Tensor, "sample token classes"]:
    """What the whole model says; in training with dropout."""
    padding = data.padding if bool(data.padding.any()) else None
    net, X = network(task, tensors), embed(task, tensors, data)
    if drop is None:
        return classify(tensors, net.run(X, padding).output)
    *_, last = training_states(net, X, drop, padding)
    return classify(tensors, drop(last))


@torch.no_grad()
def accuracy(task: Task, tensors: Tensors, data: Data, batch: int = 500) -> float:
    """The share of real tokens that the whole model labels rightly."""
    right = total = 0
    for start in range(0, len(data), batch):
        piece = data.part(slice(start, start + batch)).trimmed()
        hit = (logits(task, tensors, piece).argmax(-1) == piece.labels) & ~piece.padding
        right, total = right + int(hit.sum()), total + int((~piece.padding).sum())
    return right / total


def train(
    task: Task,
    recipe: Recipe,
    checkpoint: Path,
    device: str = "cpu",
    say: Callable[[str], None] = lambda _: None,
    stop: int | None = None,
) -> Tensors:
    """Trained tensors: from the checkpoint on, where there is one of this recipe.

    `stop`: leave off after that epoch, as an interruption would."""
    tensors = {name: each.to(device) for name, each in initial(task, recipe).items()}
    learnt = [each for name, each in tensors.items() if not name.endswith(".gain")]
    for each in learnt:
        each.requires_grad_(True)
    optimiser = torch.optim.AdamW(learnt, lr=recipe.rate, weight_decay=recipe.decay)
    done = _resume(checkpoint, recipe, tensors, optimiser, device)
    last = recipe.epochs if stop is None else stop
    data = task.train.to(device)
    batches = math.ceil(len(data) / recipe.batch)
    coming = _pieces(data, recipe, done, device)
    heard: list[float] = []

    def losses(step: int) -> Tensor:
        piece, drop = next(coming)
        real = ~piece.padding
        loss = F.cross_entropy(logits(task, tensors, piece, drop)[real], piece.labels[real])
        heard.append(float(loss.detach()))
        return loss[None]

    def keep(step: int) -> None:
        finished = step // batches
        state = {"recipe": asdict(recipe), "epoch": finished, "optimiser": optimiser.state_dict(),
                 "tensors": {name: each.detach() for name, each in tensors.items()}}  # fmt: skip
        with atomic(checkpoint) as temporary:
            torch.save(state, temporary)
        mean = sum(heard[-batches:]) / batches
        say(f"{task.name}: epoch {finished} of {recipe.epochs}, loss {mean:.4f}")

    by_step = lab.Recipe(
        steps=recipe.epochs * batches, rate=recipe.rate, warmup=recipe.warmup,
        keep_every=recipe.keep_every * batches,
    )  # fmt: skip
    steps = looped(
        by_step, optimiser, losses, lambda: _clip(learnt, recipe.clip), start=done * batches, keep=keep
    )
    for step in islice(steps, max(0, last - done) * batches):
        if step == last * batches and step % by_step.keep_every and step != by_step.steps:
            keep(step)  # as an interruption at the end of an epoch would leave it
    return {name: each.detach() for name, each in tensors.items()}


def _pieces(data: Data, recipe: Recipe, first: int, device: str) -> Iterator[tuple[Data, Dropout | None]]:
    """Samples step by step, each epoch in an order and with dropout of its own."""
    for epoch in range(first, recipe.epochs):
        drawn = recipe.seed * 100003 + epoch
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(drawn))
        drop = Dropout.seeded(recipe.dropout, drawn, device) if recipe.dropout else None
        for chosen in torch.split(order, recipe.batch):
            yield data.part(chosen.to(device)).trimmed(), drop


def _clip(learnt: list[Tensor], longest: float) -> None:
    torch.nn.utils.clip_grad_norm_(learnt, longest)


def _resume(
    checkpoint: Path, recipe: Recipe, tensors: Tensors, optimiser: torch.optim.Optimizer, device: str
) -> int:
    """Epochs already done; tensors and optimiser as they were left."""
    if not checkpoint.is_file():
        return 0
    state = torch.load(checkpoint, map_location=device, weights_only=True)
    if state["recipe"] != asdict(recipe):
        return 0
    with torch.no_grad():
        for name, each in tensors.items():
            each.copy_(state["tensors"][name])
    optimiser.load_state_dict(state["optimiser"])
    return int(state["epoch"])

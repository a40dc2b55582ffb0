"""Trainings on paths of chosen lengths: which there are, and what is read of each. `long_paths.py` asks the question.

An `Arm` restricts a network to some lengths, or changes it. `trained` trains all seeds of an arm of a task and gives
one row for each number; `path_model.py` has the network, `readout.py` the heads that are fitted anew.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import polars as pl
import torch

from rankscope.errors import StudyError, one_of
from rankscope.lab import Initialisation, Training, release_memory
from rankscope_studies.path_model import PathModel
from rankscope_studies.questions.path_networks import (
    SCHEMES,
    PathTrainingSizes,
    held_out_samples,
    mean_sizes,
    residuals,
    self_attention,
    shares,
)  # fmt: skip
from rankscope_studies.questions.readout import fitted_readout

MARKS = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0)  # Shares of a training's steps after which shares of lengths are read
ROWS = {
    "task": pl.String, "kind": pl.String, "length": pl.Int64, "condition": pl.String, "seed": pl.Int64,
    "quantity": pl.String, "at": pl.Int64, "value": pl.Float64,
}  # fmt: skip


@dataclass(frozen=True)
class LengthSizes(PathTrainingSizes):
    """How large the experiment is."""

    remedies: tuple[str, ...]
    factors: tuple[float, ...]  # Times the rate, of whole networks and the longest paths of the first task
    head_samples: int  # Other held-out samples, which new heads are fitted to


@dataclass(frozen=True)
class Arm:
    """One way to restrict and to change a network of a task."""

    kind: str = "all"  # "all" lengths, "exact"ly one, at "most", or at "least" that many heads
    length: int | None = None
    remedy: str = ""
    skips: bool = True  # False: the network itself has no skips, so that all its paths have the full length
    detached: bool = False  # No gradient goes through attention and the scales of norms
    factor: float = 1.0  # Times the task's learning rate

    @property
    def condition(self) -> str:
        """What is changed beside the lengths."""
        changes = ["" if self.skips else "no skips", self.remedy, "detached" * self.detached]
        changes.append("" if self.factor == 1 else f"rate x {self.factor:g}")
        return " ".join(filter(None, changes)) or "plain"

    def weights(self, layers: int) -> tuple[float, ...]:
        """The weight of each length from 0 on, 1 or 0."""
        k = self.length
        taken = {
            "all": range(layers + 1),
            "exact": [k],
            "most": range((k or 0) + 1),
            "least": range(k or 0, layers + 1),
        }
        if self.kind not in taken:
            raise StudyError(one_of("kind", self.kind, taken), subject="kind")
        return tuple(float(length in taken[self.kind]) for length in range(layers + 1))


def arms(task: str, sizes: LengthSizes) -> list[Arm]:
    """Every way in which networks of a task are trained."""
    last, inner = sizes.layers, range(1, sizes.layers)
    ways = [Arm(), *(Arm("exact", k) for k in range(last + 1))]
    ways += [Arm(kind, k) for kind in ("most", "least") for k in inner]
    ways += [Arm(kind, k, remedy) for remedy in sizes.remedies for kind, k in (("all", None), ("exact", last))]
    ways += [Arm("exact", last, remedy, skips=False) for remedy in ("", *sizes.remedies)]
    ways += [Arm("exact", k, detached=True) for k in dict.fromkeys((1, last))]
    for by in sizes.factors if task == sizes.tasks[0] else ():
        # Without skips and remedies tokens are equal to rounding, whatever the rate: rates are varied with a remedy.
        bare = [Arm("exact", last, remedy, skips=False, factor=by) for remedy in sizes.remedies]
        ways += [Arm(factor=by), Arm("exact", last, factor=by), *bare]
    return ways


def training_of(name: str, arm: Arm, sizes: LengthSizes, device: str = "cpu") -> Training:
    """The training of all seeds of an arm, before its first step: figure 4's recipe without dropout."""
    fields = {} if arm.skips else {"attention_skip": 0.0}
    return Training(
        sizes.task(name), sizes.architecture(name, **fields), sizes.recipe(name, arm.factor), seeds=sizes.networks,
        remedies=[arm.remedy] if arm.remedy else [], device=device,
        initialisation=Initialisation(SCHEMES[name], 1.0), capture=True,
        model=partial(PathModel, lengths=arm.weights(sizes.layers), detached=arm.detached),
    )  # fmt: skip


def trained(task: str, arm: Arm, sizes: LengthSizes, device: str = "cpu") -> pl.DataFrame:
    """Train one arm; rows of one number each: task · kind · length · condition · seed · quantity · at · value.

    | quantity           | what it is                                                                 | `at`   |
    |--------------------|----------------------------------------------------------------------------|--------|
    | `loss`, `accuracy` | held out, of the lengths that were trained                                 |        |
    | `own head`         | accuracy of each length alone with the network's own head                  | length |
    | `new head`         | the same with a linear head fitted to other held-out samples; whole nets   | length |
    | `fresh`            | the same before training                                                   | length |
    | `share MARK`       | of the output of whole networks, after that share of the steps             | length |
    | `size MARK`        | the same of the norms of all lengths, which has no sign                    | length |
    | `residual`         | log10 of the relative residual of each length's sum, trained               | length |
    | `fresh residual`   | the same before training, of networks without skips                        | length |
    | `self-attention`   | mean of the diagonal of the attention pattern, trained                     |        |
    """
    training = training_of(task, arm, sizes, device)
    try:
        rows = [*_rows(training, arm, sizes)]
    finally:
        del training
        release_memory(device)
    labels = (task, arm.kind, arm.length, arm.condition)
    return pl.DataFrame([(*labels, *row) for row in rows], schema=ROWS, orient="row")


def _rows(training: Training, arm: Arm, sizes: LengthSizes) -> Iterator[tuple[int, str, int | None, float]]:
    is_whole_network = arm.kind == "all" and arm.factor == 1
    marks = {f"{mark:g}": round(mark * training.recipe.steps) for mark in MARKS} if is_whole_network else {}
    if is_whole_network:
        yield from _head_rows(training, sizes, "fresh")
    if not arm.skips:
        yield from _residual_rows(training, sizes, "fresh residual")
    yield from _share_rows(training, sizes, [name for name, mark in marks.items() if mark == 0])
    for step in training:
        yield from _share_rows(training, sizes, [name for name, mark in marks.items() if mark == step])
    yield from _head_rows(training, sizes, "own head")
    if is_whole_network:
        yield from _head_rows(training, sizes, "new head")
    yield from _residual_rows(training, sizes, "residual")
    for seed, net, X in zip(training.seeds, training.networks(), training.tokens(sizes.probe_samples)[0], strict=True):
        yield seed, "self-attention", None, self_attention(net, X)


def _residual_rows(training: Training, sizes: LengthSizes, quantity: str) -> Iterator[tuple[int, str, int, float]]:
    """The log10 of the relative residual of each length's sum as it is now, under this name."""
    for seed, net, X in zip(training.seeds, training.networks(), training.tokens(sizes.probe_samples)[0], strict=True):
        for length, residual in enumerate(residuals(net, X)):
            yield seed, quantity, length, residual


def _head_rows(training: Training, sizes: LengthSizes, quantity: str) -> Iterator[tuple[int, str, int | None, float]]:
    """Accuracy of each length alone, by the network's own head (with loss and accuracy of what was trained) or by
    readouts that are fitted to other held-out samples."""
    task, device = training.task, training.device
    test, fit = (batch.to(device) for batch in held_out_samples(task, sizes.evaluation_samples, sizes.head_samples))
    selections = torch.eye(sizes.layers + 1, dtype=torch.float64, device=device)
    for seed, model in zip(training.seeds, training.models, strict=True):
        precise = copy.deepcopy(model).double().eval()
        assert isinstance(precise, PathModel)
        with torch.no_grad():
            terms = precise.terms(test.inputs)
            trained_logits = precise.read(terms, precise.lengths)
            if quantity == "own head":
                logits = [precise.read(terms, selection) for selection in selections]
            else:
                fit_terms = precise.terms(fit.inputs)
                X, Y = (
                    torch.stack([precise.readout(sums, selection) for selection in selections]).flatten(1, 2)
                    for sums in (fit_terms, terms)
                )
                readout = fitted_readout(X, fit.labels.flatten(), task.interface.classes)
                logits = [*readout.logits(Y).view(len(Y), *test.labels.shape, -1)]
        if quantity == "own head":
            yield seed, "loss", None, float(task.loss(trained_logits, test))
            yield seed, "accuracy", None, float(task.accuracy(trained_logits, test))
        for length, length_logits in enumerate(logits):
            yield seed, quantity, length, float(task.accuracy(length_logits, test))


def _share_rows(training: Training, sizes: LengthSizes, marks: Sequence[str]) -> Iterator[tuple[int, str, int, float]]:
    """The shares of the output and of norms by length as they are now, under the name of each of these marks."""
    if not marks:
        return
    for seed, net, X in zip(training.seeds, training.networks(), training.tokens(sizes.probe_samples)[0], strict=True):
        for name, by_length in (("share", shares(net, X)), ("size", mean_sizes(net, X))):
            for length, value in enumerate(by_length):
                for mark in marks:
                    yield seed, f"{name} {mark}", length, value

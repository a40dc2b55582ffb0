"""Networks of the question `lower-bounds`: kinds, changes and trainings, trained models at hand, and their rows.

`trained_rows` and `model_rows` are called by `lower_bounds.py`; what is read of a network is in `bound_terms.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from typing import Any, NamedTuple

import polars as pl
import torch

from rankscope.errors import StudyError
from rankscope.lab import Digits, Initialisation, NextCharacter, Recipe, Training, release_memory
from rankscope.nets import Transformer
from rankscope.sources import MINILM as MINILM_PACKAGE
from rankscope_studies.dong2021.networks import subject_at_hand
from rankscope_studies.questions.bound_terms import PARTS, RUNGS, TERMS, network_rows
from rankscope_studies.trial import SETTINGS

SKIPLESS = "no skips"
NONE, HALF_DEPTH, ONE_LAYER = "none", "half the layers", "one layer"
SHALLOW = (HALF_DEPTH, ONE_LAYER)
BRANCH_ENDS = ("attention.output.weight", "mlp.down.weight")
CHANGES: dict[str, dict[str, Any]] = {
    NONE: {},
    "smaller start": {"scheme": "xavier/sqrt(L)"},
    "branches start at a quarter": {"gains": tuple((name, 0.25) for name in BRANCH_ENDS)},
    "weight decay 1": {"weight_decay": 1.0},
    "weight decay 10": {"weight_decay": 10.0},
    "skips of weight 1.5": {"skip": 1.5},
    "skips of weight 2": {"skip": 2.0},
    "sigmaReparam": {"sigma_reparam": "sigma"},
    HALF_DEPTH: {},
    ONE_LAYER: {},
}
"""What is changed of a network or its training; the last two are controls."""
MINILM = "minilm"
MODELS = (MINILM, "rxnfp", "rxnmapper", "antiberty")  # Trained models that packages carry (`make weights`)


@dataclass(frozen=True)
class BoundSizes:
    """How large the experiment is."""

    depths: tuple[int, ...]  # Of networks that are followed through training; changes are made to the first
    width: int
    heads: int
    context: int  # Characters
    batch: int
    steps: int
    snapshots: tuple[int, ...]  # Steps after which networks are read, beside the last
    rates: tuple[float, ...]  # Learning rates: the first, and those that every change is tuned by
    seeds: int
    changed: tuple[str, ...]  # Kinds of networks that are changed
    changes: tuple[str, ...]  # Of `CHANGES`
    change_seeds: int
    samples: int  # Held-out samples that bounds are read from
    texts: int  # Texts for each trained model at hand
    tokens: int  # Of a text


class BoundTraining(NamedTuple):
    """What tells one training from the others."""

    kind: str  # A setting of `trial.py`
    depth: int  # Before the change, which may be of it
    change: str  # A name in `CHANGES`
    rate: float  # The learning rate


def training_of(labels: BoundTraining, sizes: BoundSizes, seeds: Sequence[int], device: str = "cpu") -> Training:
    """The training of changed networks, one for each seed, not begun yet."""
    kind, depth, change, rate = labels
    fields = dict(CHANGES[change])
    depth = {HALF_DEPTH: max(1, depth // 2), ONE_LAYER: 1}.get(change, depth)
    task = Digits() if kind == "images" else NextCharacter(sizes.context)
    skip = {"attention_skip": fields["skip"], "mlp_skip": fields["skip"]} if "skip" in fields else {}
    arch = task.architecture(depth, sizes.width, sizes.heads, **SETTINGS[kind] | skip)
    decay = {"weight_decay": fields["weight_decay"]} if "weight_decay" in fields else {}
    recipe = Recipe(steps=sizes.steps, batch_size=sizes.batch, lr=rate, warmup=0.1, **decay)
    start = Initialisation(
        fields.get("scheme", "xavier"), embedding_std=1.0, sigma_reparam=fields.get("sigma_reparam"),
        gains=fields.get("gains", ()),
    )  # fmt: skip
    return Training(task, arch, recipe, seeds=seeds, device=device, capture=True, initialisation=start)


def trained_rows(labels: BoundTraining, sizes: BoundSizes, device: str = "cpu") -> pl.DataFrame:
    """Train networks and read their bounds: unchanged ones at the first rate at every snapshot, others at the end."""
    followed = labels.change == NONE and labels.rate == sizes.rates[0]
    seeds = range(sizes.seeds if followed else sizes.change_seeds)
    training = training_of(labels, sizes, seeds, device)
    snapshots = {*(sizes.snapshots if followed else ()), sizes.steps}
    rows = _read(training, labels, 0, sizes.samples) if 0 in snapshots else []
    for step in training:
        if step in snapshots:
            rows += _read(training, labels, step, sizes.samples)
    del training
    release_memory(device)
    return pl.DataFrame(rows, schema=SCHEMA)


LABELS = {"network": pl.String, "kind": pl.String, "depth": pl.Int64, "change": pl.String, "rate": pl.Float64,
          "seed": pl.Int64, "step": pl.Int64, "stage": pl.String, "loss": pl.Float64, "blind": pl.Float64}  # fmt: skip
NUMBERS = ("measured", *RUNGS, "untouched", "lambda", "loose", "carried", "rank",
           *(f"{part}_{term}" for part, term in product(PARTS, TERMS)))  # fmt: skip
SCHEMA: dict[str, Any] = {**LABELS, "layer": pl.Int64, **dict.fromkeys(NUMBERS, pl.Float64)}
"""One row for each network, step and layer: `network_rows` says what the numbers are."""


def _read(training: Training, labels: BoundTraining, step: int, samples: int) -> list[dict[str, Any]]:
    """Rows of all networks of a training at a step; one without numbers for a network that has diverged."""
    losses, blind = [evaluation.loss for evaluation in training.evaluate()], training.task.blind
    kind, depth, change, rate = labels
    last = step == training.recipe.steps
    rows = []
    for k, (net, X) in enumerate(zip(training.networks(), training.tokens(samples)[0], strict=True)):
        columns = {"network": f"{kind}, {depth} layers", "kind": kind, "depth": net.arch.layers, "change": change,
                  "rate": rate, "seed": training.seeds[k], "step": step, "loss": losses[k], "blind": blind,
                  "stage": "fresh" if step == 0 else "trained" if last else "between"}  # fmt: skip
        finite = math.isfinite(losses[k])
        read = network_rows(net, X, terms=step == 0 or last) if finite else [{"layer": net.arch.layers}]
        rows += [columns | row for row in read]
    return rows


def models_at_hand() -> list[str]:
    """The names of trained models that can be loaded here."""
    if find_spec("transformers") is None:
        return []
    return [name for name in MODELS if find_spec(MINILM_PACKAGE if name == MINILM else name)]


def model_rows(name: str, sizes: BoundSizes) -> pl.DataFrame:
    """Bounds of a trained model on texts of its own kind, and of fresh weights of its architecture on these tokens.

    Raises:
        StudyError: The model's package has no weights.
    """
    subject = subject_at_hand(name, sizes.texts, sizes.tokens)
    if subject is None:
        raise StudyError(f"the package {name} must hold weights; got none: install it again", subject=name)
    net, X, padding = subject.net, subject.X[: sizes.texts], subject.padding[: sizes.texts]
    rows = []
    for stage, read in (("fresh", Transformer.random(net.arch, 0, "bert")), ("trained", net)):
        labels = {"network": name, "kind": "at hand", "depth": net.arch.layers, "change": NONE, "seed": 0,
                  "stage": stage}  # fmt: skip
        rows += [labels | row for row in network_rows(read, X.to(torch.float64), padding)]
    return pl.DataFrame(rows, schema=SCHEMA)

"""Patterns of efficient transformers: their graphs, their falls in fresh networks, certificates, trainings, and costs.

`efficient.py` asks the question; each function here gives one table of it, or a piece of one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from rankscope.errors import TheoremError
from rankscope.lab import Digits, Initialisation, Recipe, Training
from rankscope.nets import Architecture, Transformer, matrix_graph
from rankscope.nets import mask_matrix as matrix
from rankscope.profiles import measure
from rankscope.sources import bundled_excerpts, word_tokens
from rankscope.theory import certify
from rankscope_studies.remedies.trainings import step_seconds

PATTERNS: dict[str, tuple[str, str]] = {  # name: (mask, kernel)
    "complete": ("complete", "softmax"),
    "causal": ("causal", "softmax"),
    "window 2": ("window:2", "softmax"),
    "window 8": ("window:8", "softmax"),
    "sliding window": ("causal&window:8", "softmax"),
    "unidirectional": ("unidirectional", "softmax"),
    "dilated": ("dilated:2:4", "softmax"),
    "sparse transformer": ("strided", "softmax"),
    "longformer": ("longformer:2:1", "softmax"),
    "bigbird": ("bigbird:2:1:3", "softmax"),
    "prefix": ("prefix:4", "softmax"),
    "uniform": ("complete", "uniform"),
    "linear": ("complete", "linear"),
    "gaussian": ("complete", "gaussian"),
    "sigmoid": ("complete", "sigmoid"),
    "sinkhorn": ("complete", "sinkhorn:5"),
    "linformer": ("complete", "linformer:8"),
}
FORMS = {"bare": "san", "norm": "san+norm", "whole": "transformer"}
METRIC = "relative_residual"
INIT = "xavier"
ROUNDED = 1e-13  # What is left of size one below this is rounding
CURVES = {
    "pattern": pl.String, "form": pl.String, "seed": pl.Int64, "layer": pl.Int64, "log10": pl.Float64,
    "marked": pl.Boolean, "arithmetic": pl.String,
}  # fmt: skip
CERTIFICATES = {
    "pattern": pl.String, "seed": pl.Int64, "theorem": pl.String, "kind": pl.String, "met_to": pl.Int64,
    "says_at": pl.Int64, "slack": pl.Float64, "why": pl.String,
}  # fmt: skip


@dataclass(frozen=True)
class PatternSizes:
    """How large the experiment is."""

    patterns: tuple[str, ...]
    depth: int  # Layers of fresh networks
    width: int
    heads: int
    tokens: int
    samples: int
    seeds: int
    certified_depth: int
    certified_seeds: int
    trained_depth: int
    trained_width: int
    trained_seeds: int
    steps: int
    batch: int
    patch: int  # Side of a patch of the 8 x 8 digits that networks are trained on
    timed_steps: int  # Of each of three rounds


def graphs(sizes: PatternSizes) -> pl.DataFrame:
    """The graph of each mask on the tokens of fresh networks: pattern · mask · kernel · masked · radius ·
    diameter · keys · eigenvalue · even.

    `masked` is True for softmax attention, where patterns differ in their mask alone; `keys` is how many tokens a token
    sees on average; `eigenvalue` the second largest size of an eigenvalue of even attention under the mask; `even` is
    log10 of what is left of differences after all layers if attention is even throughout.
    """
    rows = []
    for name in sizes.patterns:
        mask, kernel = PATTERNS[name]
        M = matrix(mask, sizes.tokens)
        graph = matrix_graph(M)
        rows.append({
            "pattern": name, "mask": mask, "kernel": kernel, "masked": kernel == "softmax", "radius": graph.radius,
            "diameter": graph.diameter, "keys": graph.edges / sizes.tokens, "eigenvalue": second_eigenvalue(M.numpy()),
            "even": even_fall(M.numpy(), sizes.depth),
        })  # fmt: skip
    return pl.DataFrame(rows, schema_overrides={"radius": pl.Int64, "diameter": pl.Int64})


def second_eigenvalue(M: Any) -> float:
    """The second largest size of an eigenvalue of A, rows of M divided by their sums.

    >>> round(second_eigenvalue(np.tri(5)), 6), round(second_eigenvalue(np.ones((4, 4))), 6)
    (0.5, 0.0)
    """
    A = np.asarray(M, dtype=float)
    sizes = np.sort(np.abs(np.linalg.eigvals(A / A.sum(1, keepdims=True))))
    return float(sizes[-2])


def even_fall(M: Any, layers: int) -> float:
    """log10 of `||C A^L||_F / ||C||_F`, `C = I - 11^T/n`, A the rows of M divided by their sums: what is left of
    differences after L layers of even attention. Since A keeps what is equal, `C A^L = (C A)^L C`, which is followed
    with its scale apart, however small it gets; -inf where a layer leaves nothing but rounding.

    >>> round(even_fall(np.array([[3, 1], [1, 3]]), 2000) / 2000, 6), even_fall(np.ones((4, 4)), 2)
    (-0.30103, -inf)
    """
    A = np.asarray(M, dtype=float)
    A = A / A.sum(1, keepdims=True)
    C = np.eye(len(A)) - 1 / len(A)
    R, log10 = C / np.linalg.norm(C), 0.0
    for _ in range(layers):
        R = C @ A @ R
        size = float(np.linalg.norm(R))
        if size < ROUNDED:
            return -math.inf
        R, log10 = R / size, log10 + math.log10(size)
    return log10


def fresh_curve(name: str, form: str, seed: int, sizes: PatternSizes, device: str = "cpu") -> pl.DataFrame:
    """log10 of the relative residual after every layer of a fresh network, the mean over samples; `marked` where two
    passes that round otherwise differ, or float64 has come to its floor (kernels without a deviation rule)."""
    net = _network(name, sizes.depth, seed, sizes).to(device=device).variant(FORMS[form])
    X, padding = word_tokens(bundled_excerpts(sizes.tokens)[: sizes.samples], sizes.width, sizes.tokens)
    profile = measure(net, X, padding, METRIC)
    logs, marks = profile.curve(METRIC, "log10").mean(0), profile.curve(METRIC, "below_floor")
    rows = [
        (name, form, seed, layer, float(log), bool((marks[:, layer] == 1).any()), profile.arithmetics[0])
        for layer, log in enumerate(logs)
    ]
    return pl.DataFrame(rows, schema=CURVES, orient="row")


def certified(name: str, seed: int, sizes: PatternSizes) -> pl.DataFrame:
    """What theorems say of bare heads: up to which layer each holds and says something, and how loose it is there."""
    net = _network(name, sizes.certified_depth, seed, sizes).variant("san")
    X, padding = word_tokens(bundled_excerpts(sizes.tokens)[:1], sizes.width, sizes.tokens)
    try:
        summary = certify(net, X, padding).summary()
    except TheoremError as refused:
        return pl.DataFrame([{"pattern": name, "seed": seed, "why": str(refused)}], schema=CERTIFICATES)
    rows = summary.select("theorem", "kind", "met_to", "says_at", "slack", "why")
    labelled = rows.with_columns(pattern=pl.lit(name), seed=pl.lit(seed, pl.Int64))
    return labelled.select(pl.col(column).cast(kind) for column, kind in CERTIFICATES.items())


def trained_losses(name: str, sizes: PatternSizes, device: str = "cpu") -> pl.DataFrame:
    """Held-out loss and accuracy of whole networks that learnt which digit an image shows, for each seed."""
    training = _training(name, sizes, sizes.steps, device, range(sizes.trained_seeds)).finish()
    rows = [
        {"pattern": name, "seed": seed, "loss": evaluation.loss, "accuracy": evaluation.accuracy}
        for seed, evaluation in zip(training.seeds, training.evaluate(360), strict=True)
    ]
    return pl.DataFrame(rows)


def costs(sizes: PatternSizes, device: str = "cpu") -> pl.DataFrame:
    """Seconds of a training step of each pattern as a multiple of the first's, in three rounds that take turns."""
    rounds, warm = 3, 1
    steps = warm + rounds * sizes.timed_steps
    running = {name: _training(name, sizes, steps, device, [0]) for name in sizes.patterns}
    seconds = step_seconds(running, device, warm, sizes.timed_steps, rounds)
    baseline = seconds[sizes.patterns[0]]
    rows = [
        {"pattern": name, "round": index, "ratio": by_round[index] / baseline[index]}
        for name, by_round in seconds.items()
        for index in range(rounds)
    ]
    return pl.DataFrame(rows)


def _network(name: str, layers: int, seed: int, sizes: PatternSizes) -> Transformer:
    mask, kernel = PATTERNS[name]
    arch = Architecture(
        layers=layers, width=sizes.width, heads=sizes.heads, mask=mask, kernel=kernel, norm_place="pre",
        length=sizes.tokens,
    )  # fmt: skip
    return Transformer.random(arch, seed=seed, init=INIT)


def _training(name: str, sizes: PatternSizes, steps: int, device: str, seeds: Sequence[int]) -> Training:
    task, (mask, kernel) = Digits(patch=sizes.patch), PATTERNS[name]
    arch = task.architecture(sizes.trained_depth, sizes.trained_width, sizes.heads, mask=mask, kernel=kernel)
    recipe = Recipe(steps=steps, batch_size=sizes.batch, warmup=0.1)
    start = Initialisation(INIT, embedding_std=1.0)
    return Training(task, arch, recipe, seeds=list(seeds), initialisation=start, device=device, capture=True)

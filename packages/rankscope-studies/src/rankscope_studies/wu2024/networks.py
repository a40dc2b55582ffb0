"""What this paper's figures are run on: networks, prose, variants and masks."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import polars as pl
import torch
from torch import Tensor

from rankscope.errors import SourceError
from rankscope.figures import power
from rankscope.metrics import mean_abs_cosine, metric, singular_values, unit_of, valid_tokens
from rankscope.nets import Dropout, Transformer, training_states
from rankscope.profiles import ReadingRow, measure, read_tensor, readings_table
from rankscope.sources import bundled_excerpts, fresh, load
from rankscope_studies.study import Setup, StudyTexts

VARIANTS = {
    "SAN": "san",
    "SAN + skip": "san+skip",
    "SAN + LN": "san+norm",
    "SAN + skip + LN": "san+skip+norm",
    "transformer": "transformer",
}
MASKS = {"complete": "complete", "causal": "causal", "window ±1": "window:1", "uni-directional": "unidirectional"}
DROPOUT = 0.1  # BERT's, of attention, branches and embedding
TOKENS = 128
COLLAPSE = ("mu", "relative_mu")

UNTRAINED = "BERT untrained"
PUBLISHED_MODELS = {"BERT": "bert-base", "GPT-2": "gpt2", "T5": "t5-base", "ALBERT": "albert-base"}  # By `fresh` name
SHARED = StudyTexts("wu2024", "shared")


def trained(setup: Setup) -> dict[str, Transformer]:
    """The models asked for, else MiniLM, a BERT of 6 layers, where it is installed."""
    if setup.models:
        nets = (load(name, device=setup.device) for name in setup.models)
        return dict(zip(short_names(setup.models), nets, strict=True))
    try:
        return {"MiniLM": load("minilm", device=setup.device)}
    except SourceError:
        return {}


def short_names(models: Sequence[str]) -> list[str]:
    """A hub id or directory by its last part, unless two share it.

    >>> short_names(["openai-community/gpt2", "/models/one/bert", "/models/two/bert"])
    ['gpt2', '/models/one/bert', '/models/two/bert']
    """
    last = [Path(name).name for name in models]
    return [short if last.count(short) == 1 else name for short, name in zip(last, models, strict=True)]


def note_values(nets: dict[str, Transformer]) -> dict[str, str]:
    """What notes say of models: which trained ones there were (`trained`), and what could not be had (`missing`)."""
    sizes = [f"{name} ({net.arch.layers} layers, width {net.arch.width})" for name, net in nets.items()]
    trained = "Trained: " + ", ".join(sizes) + "." if sizes else SHARED.sentence("no_model")
    return {"trained": trained, "missing": SHARED.sentence("missing")}


def excerpts(samples: int) -> list[str]:
    """Paragraphs of at least `TOKENS` words, spread evenly over the bundled prose."""
    texts = bundled_excerpts(TOKENS)
    return [texts[k * len(texts) // samples] for k in range(min(samples, len(texts)))]


def tokens_of(net: Transformer, texts: Sequence[str], length: int = TOKENS) -> Tensor:
    """The first tokens of each text, none of them padded."""
    X, padding = net.encode(list(texts), length)
    assert not bool(padding.any())
    return X


@dataclass(frozen=True)
class StudyInputs:
    """The networks and texts that figures are run on; smaller ones show how a study goes in a moment."""

    fresh: Callable[..., Transformer] = fresh  # An untrained network by the name of its architecture and a device
    trained: Callable[[Setup], dict[str, Transformer]] = trained
    samples: int = 1000  # Excerpts at most, whatever a figure asks for
    length: int = TOKENS  # Tokens of an excerpt

    def bert(self, setup: Setup) -> dict[str, Transformer]:
        """BERT of base size with random weights, by the name that figures have for it."""
        return {UNTRAINED: self.fresh("bert-base", device=setup.device)}

    def tokens(self, net: Transformer, samples: int) -> Tensor:
        """What a network makes of so many excerpts."""
        return tokens_of(net, excerpts(min(samples, self.samples)), self.length)


PAPER = StudyInputs()  # The sizes of the paper


def file_name(*names: str) -> str:
    """A name for a cached table that does for a file."""
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", " ".join(names))


def collapse(
    net: Transformer, X: Tensor, variant: str, mask: str, *, dropout: bool = False, arithmetic: str = "deviation"
) -> pl.DataFrame:
    """mu and mu / ||X||_F by layer of a variant under a mask.

    Args:
        net: The network as it is.
        X: Its tokens.
        variant: Of `VARIANTS`.
        mask: Of `MASKS`.
        dropout: Measure a training pass.
        arithmetic: That `measure` takes.
    """
    changed = net.variant(VARIANTS[variant]).variant(mask=MASKS[mask])
    if dropout:
        table = in_training(changed, X)
    else:
        table = measure(changed, X, metrics=list(COLLAPSE), arithmetic=arithmetic, batch_size=4).table
    return table.drop("variant", "head").with_columns(
        pl.lit(variant).alias("variant"), pl.lit(mask).alias("mask"), pl.lit(dropout).alias("dropout")
    )


def swept(setup: Setup, net: Transformer, X: Tensor, *name: str, **settings: object) -> pl.DataFrame:
    """Every variant under every mask, with and without dropout."""
    parts = {}
    for variant, mask, dropout in product(VARIANTS, MASKS, (False, True)):
        file = file_name(*name, variant, mask, "dropout" if dropout else "")
        parts[file] = partial(collapse, net, X, variant, mask, dropout=dropout)
    return setup.cached_parts(parts, **settings)


def of_network(name: str, table: pl.DataFrame) -> pl.DataFrame:
    """A table with the name of its network in the first column."""
    return table.select(pl.lit(name).alias("network"), pl.all())


def in_training(net: Transformer, X: Tensor) -> pl.DataFrame:
    """mu and mu / ||X||_F by layer with dropout, in float64: deviation arithmetic needs rows of attention
    that sum to one."""
    chosen, unit = [metric(name) for name in COLLAPSE], unit_of(net.dtype)
    valid = valid_tokens(X.shape[:-1], None, X.device)
    drop = Dropout.seeded(DROPOUT, 0, net.device)
    entries = [
        ReadingRow(layer, 0, *pair)
        for layer, state in enumerate(training_states(net, X, drop))
        for pair in read_tensor("tokens", state, valid, chosen, unit)[0]
    ]
    return readings_table(entries, "", "float64")


def last(table: pl.DataFrame, name: str, **which: object) -> float:
    """log10 of a metric at the last layer, the mean over excerpts; -inf where all are exactly zero."""
    part = table.filter(*(pl.col(column) == value for column, value in which.items()), metric=name)
    return float(part.filter(pl.col("layer") == pl.col("layer").max())["log10"].mean())  # type: ignore[arg-type]


def least_with_skips(table: pl.DataFrame, **which: object) -> dict[str, float]:
    """By variant with a skip, log10 of the smallest relative mu of any mask at the last layer."""
    return {
        variant: min(last(table, "relative_mu", variant=variant, mask=mask, **which) for mask in MASKS)
        for variant in VARIANTS
        if "skip" in variant or variant == "transformer"
    }


def powers(logs: dict[str, float]) -> str:
    """Each name with its number."""
    return ", ".join(f"{name} {power(log)}" for name, log in logs.items())


def spectra(setup: Setup, samples: int, inputs: StudyInputs = PAPER) -> pl.DataFrame:
    """Singular values of every network's tokens, a row per sample, layer and singular value; `size` is the larger of n
    and d. Networks: what is at hand trained, then the paper's four untrained, which could not be had otherwise."""
    random = {
        f"{name} untrained": inputs.fresh(preset, device=setup.device) for name, preset in PUBLISHED_MODELS.items()
    }
    tables = []
    for name, net in {**inputs.trained(setup), **random}.items():
        X = inputs.tokens(net, samples)
        table = setup.cached(file_name(name), lambda net=net, X=X: spectrum(net, X), excerpts=samples)
        tables.append(of_network(name, table))
    return pl.concat(tables)


def spectrum(net: Transformer, X: Tensor, batch: int = 4) -> pl.DataFrame:
    """Every singular value of the tokens at every layer, in float64, and their mean |cosine|."""
    tables = []
    for start in range(0, len(X), batch):
        for step in net.steps(X[start : start + batch]):
            values = singular_values(step.state).cpu()
            angles = mean_abs_cosine(step.state).cpu()
            samples, count = values.shape
            tables.append(
                pl.DataFrame(
                    {
                        "sample": torch.arange(start, start + samples).repeat_interleave(count),
                        "layer": torch.full((values.numel(),), step.layer),
                        "index": torch.arange(1, count + 1).repeat(samples),
                        "singular_value": values.flatten(),
                        "size": torch.full((values.numel(),), max(X.shape[1:])),
                        "mean_abs_cosine": angles.repeat_interleave(count),
                    }
                )
            )
    return pl.concat(tables)

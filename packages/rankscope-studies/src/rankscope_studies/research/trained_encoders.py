"""Does one kind of training keep tokens further apart than another? Sixteen trainings of one small encoder.

    make weights                                                             # the package `sceptr`, which carries them
    python -m rankscope_studies.research.trained_encoders run TABLE.csv  # a minute of one core
    # other receptors than those drawn here
    python -m rankscope_studies.research.trained_encoders run TABLE.csv --receptors FILE
    python -m rankscope_studies.research.trained_encoders draw TABLE.csv -o FIGURE.png  # and prints the table

Each training is mapped onto a network of ours by `Trained.family` and `rankscope.load`, which checks it against the
module of its package. Predictions, made before the first run, are in docs/trained.md.

Receptors are drawn: a V and a J gene of each chain, their ends trimmed and joined by random residues
(`draw_receptors`). A file of measured ones has columns v_a_gene, cdr3_a_aa, v_b_gene, cdr3_b_aa, as the one named
dash_human.csv in the sources of tcrdist3.
"""

import argparse
import csv
import json
import math
import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import polars as pl
import torch
from torch import Tensor, nn

from rankscope import figures as fig
from rankscope import load, measure, metrics
from rankscope.figures import plot, png, rendered
from rankscope.files import atomic
from rankscope.nets import Architecture, Encoded, Linear, Transformer
from rankscope.sources import Family
from rankscope.sources.families import Tensors, dense, heads_in, heads_out, norm

WEIGHTS = Path(os.environ.get("RANKSCOPE_WEIGHTS", Path(__file__).parents[5] / ".weights"))
COUNT, SEEDS = 100, 5
METRICS = ("relative_residual", "relative_mu", "entropy")
VARIANTS = ("network", "san+norm", "san")
ENTROPY = "entropy of attention (nats)"
RESIDUES = "network, residues alone"  # Readings without the first token, which stands for the receptor
UNTRAINED = "untrained"


class Training(NamedTuple):
    """What a training of `sceptr` is, and which others it can be compared with."""

    folder: str
    label: str
    group: str
    what: str


MASKED, BOTH, READ, ONE, SIZES = (
    "filling in alone", "filling in and contrast", "other contrast", "one chain", "other widths"
)  # fmt: skip
TRAININGS = (
    Training("SCEPTR", "default", BOTH, "masked residues and a contrastive loss on the first token"),
    Training("SCEPTR_BLOSUM", "BLOSUM", BOTH, "residues enter as rows of BLOSUM62"),
    Training("SCEPTR_left_aligned", "left-aligned", BOTH, "learned embedding, positions from the left"),
    Training("SCEPTR_shuffled_data", "shuffled", BOTH, "chains paired at random"),
    Training("SCEPTR_synthetic_data", "synthetic", BOTH, "receptors of a generative model"),
    Training("SCEPTR_average_pooling", "average pooling", READ, "the contrastive loss reads the average of layer 2"),
    Training("SCEPTR_dropout_noise_only", "dropout noise", READ, "its two views differ by dropout alone"),
    Training("SCEPTR_finetuned", "fine-tuned", READ, "the default, then contrast by epitope"),
    Training("SCEPTR_MLM_only", "masked only", MASKED, "no contrastive loss"),
    Training("SCEPTR_CDR3_only", "CDR3", BOTH, "CDR3 alone"),
    Training("SCEPTR_CDR3_only_MLM_only", "CDR3, masked only", MASKED, "CDR3 alone, no contrastive loss"),
    Training("A_SCEPTR", "alpha", ONE, "alpha chain alone, half the epochs"),
    Training("B_SCEPTR", "beta", ONE, "beta chain alone, half the epochs"),
    Training("SCEPTR_tiny", "width 16", SIZES, "as the default"),
    Training("SCEPTR_small", "width 32", SIZES, "as the default"),
    Training("SCEPTR_large", "width 128", SIZES, "as the default, 4 layers"),
)
SAME = ("default", "BLOSUM", "left-aligned", "shuffled", "synthetic")
"""Trainings with the same losses on the same loops, of one width: how far these differ is the scale of a difference."""


@contextmanager
def packages(weights: Path = WEIGHTS) -> Iterator[None]:
    """Lets Python import packages from the folder of weights, inside.

    `libtcrlm` imports pandas for functions on tables, which nobody calls here: where pandas is missing, an empty module
    stands in for it meanwhile.
    """
    stand_in = ModuleType("pandas")
    vars(stand_in).update(DataFrame=object, Series=object)
    missing = "pandas" not in sys.modules and "libtcrlm" not in sys.modules
    sys.path.insert(0, str(weights))
    if missing:
        sys.modules["pandas"] = stand_in
    try:
        yield
    finally:
        sys.path.remove(str(weights))
        if missing:
            del sys.modules["pandas"]


def attention(name: str, module: nn.MultiheadAttention) -> Tensors:
    """The tensors of torch's attention, by our names; `name` is "attention" or "cross"."""
    assert module.in_proj_weight is not None and module.in_proj_bias is not None
    pairs = zip(module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3), strict=True)
    tensors: Tensors = {}
    for part, (weight, bias) in zip(("query", "key", "value"), pairs, strict=True):
        tensors |= heads_in(f"{name}.{part}", Linear(weight.T, bias), module.num_heads)
    return tensors | heads_out(f"{name}.output", module.out_proj, module.num_heads)


def torch_block(block: Any) -> Tensors:
    """The tensors of a `nn.TransformerEncoderLayer` or `nn.TransformerDecoderLayer`, by our names."""
    last = "norm3" if hasattr(block, "multihead_attn") else "norm2"
    tensors = attention("attention", block.self_attn) | norm("attention_norm", block.norm1)
    if last == "norm3":
        tensors |= attention("cross", block.multihead_attn) | norm("cross_norm", block.norm2)
    return tensors | dense("mlp.up", block.linear1) | dense("mlp.down", block.linear2) | norm(
        "mlp_norm", getattr(block, last)
    )  # fmt: skip


def torch_architecture(blocks: Sequence[Any], **fields: Any) -> Architecture:
    """The architecture of torch's encoder or decoder layers: post-norm, ReLU."""
    first = blocks[0]
    assert not first.norm_first and first.activation is nn.functional.relu
    sizes = {"width": first.linear1.in_features, "heads": first.self_attn.num_heads}
    return Architecture(
        layers=len(blocks), mlp_width=first.linear1.out_features, activation="relu", norm_place="post",
        norm_eps=first.norm1.eps, **sizes, **fields,
    )  # fmt: skip


@dataclass(frozen=True)
class Projection:
    """Layer 0 of these encoders: raw embeddings through a projection, if there is one."""

    weight: Tensor | None  # [raw, width]
    width: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample of a parity check."""
        return (24, self.width if self.weight is None else len(self.weight))

    def embed(self, inputs: Tensor, padding: Tensor | None = None) -> Encoded:
        """Tokens of layer 0, zero at padding."""
        X = inputs.double() if self.weight is None else inputs.double() @ self.weight.double()
        padding = torch.zeros(X.shape[:2], dtype=torch.bool) if padding is None else padding
        return Encoded(X.masked_fill(padding[..., None], 0.0), padding)


class ReceptorEncoder(Family):
    """The stack of libtcrlm's encoders: a projection, where there is one, and torch's encoder."""

    name, continuous_inputs, input_name = "libtcrlm", True, "token_embeddings"
    embedding_parts: ClassVar[dict[str, str]] = {}

    def blocks(self, model: Any) -> list[Any]:
        """torch's layers, at one of two depths of nesting."""
        return list(getattr(model, "_standard_stack", model)._self_attention_stack.layers)

    def architecture(self, config: Any) -> Architecture:
        """Read off the modules: there is no config."""
        return torch_architecture(self.blocks(config))

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """The tensors of one layer."""
        return torch_block(block)

    def embedding(self, model: Any) -> Projection:
        """The projection, without a bias."""
        projector = getattr(model, "_initial_projector", None)
        return Projection(None if projector is None else projector.weight.detach().T, model.d_model)

    def call(self, model: Any, arguments: Any, attention: bool) -> tuple[Tensor | None, list[Tensor]]:
        """Run the stack without padding."""
        model(arguments["token_embeddings"], None)
        return None, []


@dataclass(frozen=True)
class Trained:
    """One training: the package's own module in float64, its tokeniser, and the network that `load` made of it."""

    bert: Any
    tokeniser: Any
    net: Transformer

    @classmethod
    def read(cls, folder: str, seed: int | None = None, weights: Path = WEIGHTS) -> "Trained":
        """Read a training; with a seed, the same design with the weights that its own code draws."""
        with packages(weights):
            path = weights / "sceptr" / "_model_saves" / folder
            reader = import_module("libtcrlm.config_reader").ConfigReader(
                json.loads((path / "config.json").read_text())
            )
            torch.manual_seed(seed or 0)
            bert = reader.get_bert().double().eval()
            if seed is None:
                bert.load_state_dict(torch.load(path / "state_dict.pt", "cpu", weights_only=True))
            return cls(bert, reader.get_tokeniser(), load(bert._self_attention_stack, family=ReceptorEncoder()))

    @torch.no_grad()
    def raw(self, receptors: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
        """(ids `[receptor, token, 4]`, embeddings before the projection, padding) of receptors."""
        ids = nn.utils.rnn.pad_sequence([self.tokeniser.tokenise(receptor) for receptor in receptors], True)
        return ids, self.bert._embed(ids).double(), self.bert._get_padding_mask(ids)

    @torch.no_grad()
    def encode(self, receptors: Sequence[Any]) -> Encoded:
        """Tokens of layer 0 of receptors, and their padding."""
        _, raw, padding = self.raw(receptors)
        return ReceptorEncoder().embedding(self.bert._self_attention_stack).embed(raw, padding)


def receptor(trav: str, cdr3_alpha: str, trbv: str, cdr3_beta: str, weights: Path = WEIGHTS) -> Any:
    """A receptor as libtcrlm has it, by V gene and CDR3 of each chain; the other loops are those of the genes."""
    with packages(weights):
        schema = import_module("libtcrlm.schema")
        return schema.make_tcr_from_components(trav, cdr3_alpha, trbv, cdr3_beta)


def draw_receptors(count: int = COUNT, seed: int = 0, weights: Path = WEIGHTS) -> list[Any]:
    """Receptors joined from germline genes: ends trimmed, up to 3 residues (alpha) or 6 (beta) between them."""
    with packages(weights):
        tidytcells = import_module("tidytcells")
        generator = random.Random(seed)
        drawn: list[Any] = []

        def germline(kind: str) -> dict[str, dict[str, str]]:
            names = sorted(tidytcells.tr.query(species="homosapiens", contains_pattern=kind, functionality="F",
                                               precision="gene"))  # fmt: skip
            found = {}
            for name in names:
                parts: dict[str, str] = {}
                with suppress(ValueError):  # its first allele has no sequence
                    parts = tidytcells.tr.get_aa_sequence(f"{name}*01", species="homosapiens")
                if {"V-REGION", "FR3-IMGT", "CDR1-IMGT", "CDR2-IMGT"} <= parts.keys() or "J-PHE" in parts:
                    found[f"{name}*01"] = parts
            return found

        def junction(v: dict[str, str], j: dict[str, str], most: int) -> str:
            start = v["V-REGION"].index(v["FR3-IMGT"]) + len(v["FR3-IMGT"]) - 1  # at the conserved cysteine
            head = v["V-REGION"][start:]
            tail = j["J-REGION"]
            tail = tail[: next(k for k in range(len(tail)) if tail[k] in "FW" and tail[k + 1] == "G") + 1]
            head = head[: max(len(head) - generator.randint(0, 2), 3)]
            tail = tail[min(generator.randint(0, 3), len(tail) - 4) :]
            return head + "".join(generator.choices("GGGSSAARTPLDENQVYK", k=generator.randint(0, most))) + tail

        genes = {kind: germline(kind) for kind in ("TRAV", "TRAJ", "TRBV", "TRBJ")}
        while len(drawn) < count:
            names = {kind: generator.choice(sorted(parts)) for kind, parts in genes.items()}
            picked = {kind: genes[kind][name] for kind, name in names.items()}
            try:
                loops = junction(picked["TRAV"], picked["TRAJ"], 3), junction(picked["TRBV"], picked["TRBJ"], 6)
            except (ValueError, StopIteration):  # a gene without its conserved ends
                continue
            if all(loop[0] == "C" and 8 <= len(loop) <= 20 for loop in loops):
                drawn.append(receptor(names["TRAV"], loops[0], names["TRBV"], loops[1], weights))
        return drawn


def read_receptors(path: Path, count: int = COUNT, seed: int = 0) -> list[Any]:
    """Receptors of a file, as many as `count` of those that differ, drawn without replacement."""
    with path.open(newline="") as file:
        rows_of = csv.DictReader(file)
        unlike = sorted({(row["v_a_gene"], row["cdr3_a_aa"], row["v_b_gene"], row["cdr3_b_aa"]) for row in rows_of})
    random.Random(seed).shuffle(unlike)
    usable: list[Any] = []
    for alpha_gene, alpha, beta_gene, beta in unlike:
        with suppress(Exception):  # a gene of another naming, or without loops: libtcrlm raises its own errors
            found = receptor(alpha_gene, alpha, beta_gene, beta)
            if all((found.cdr1a_sequence, found.cdr2a_sequence, found.cdr1b_sequence, found.cdr2b_sequence)):
                usable.append(found)
        if len(usable) == count:
            break
    return usable


@torch.no_grad()
def rows(label: str, trained: Trained, receptors: Sequence[Any]) -> pl.DataFrame:
    """Means over receptors, and their standard deviations, of each metric at each layer: of the network, of its tokens
    without the first one, and of the network as pure attention."""
    X, padding = trained.encode(receptors)
    tables = []
    for name in VARIANTS:
        net = trained.net if name == "network" else trained.net.variant(name)
        profile = measure(net, X, padding, METRICS)
        tables.append(profile.table.select("sample", "layer", "metric", "value", "log10", pl.lit(name).alias("of")))
    states = trained.net.run(X, padding).states
    for metric, (layer, state) in product(METRICS[:2], enumerate(states)):
        values = getattr(metrics, metric)(state[:, 1:], padding[:, 1:])
        columns = {"sample": range(len(X)), "layer": layer, "metric": metric, "value": values.tolist()}
        tables.append(pl.DataFrame(columns | {"log10": values.log10().tolist(), "of": RESIDUES}))
    table = pl.concat([table.cast({"sample": pl.Int64, "layer": pl.Int64}) for table in tables])
    mean, sd = pl.col("value").mean().alias("mean"), pl.col("value").std().alias("sd")
    means = table.group_by("of", "metric", "layer").agg(mean, sd, pl.col("log10").mean())
    numbers = [pl.col(name).round_sig_figs(6) for name in ("mean", "sd", "log10")]
    return means.sort("of", "metric", "layer").select(
        pl.lit(label).alias("training"), "of", "metric", "layer", *numbers
    )


def run(path: Path, receptors: Sequence[Any], trainings: Sequence[Training] = TRAININGS, seeds: int = SEEDS) -> None:
    """Measure all trainings, and the default design untrained, on the same receptors."""
    tables = [rows(training.label, Trained.read(training.folder), receptors) for training in trainings]
    for seed in range(seeds):
        tables.append(rows(f"{UNTRAINED} {seed}", Trained.read("SCEPTR", seed), receptors))
    with atomic(path) as file:
        pl.concat(tables).write_csv(file)


def curve(table: pl.DataFrame, label: str, metric: str, of: str = "network", column: str = "mean") -> list[float]:
    """The numbers of a training by layer; "untrained": means over seeds."""
    rows = table.filter(of=of, metric=metric)
    if label == UNTRAINED:
        rows = rows.filter(pl.col("training").str.starts_with(UNTRAINED))
        rows = rows.group_by("layer").agg(pl.col(column).mean())
    else:
        rows = rows.filter(training=label)
    return [float(value) for value in rows.sort("layer")[column]]


def untrained_names(table: pl.DataFrame) -> list[str]:
    """The labels of the untrained networks, one for each seed."""
    return [name for name in table["training"].unique(maintain_order=True) if name.startswith(UNTRAINED)]


def spread(table: pl.DataFrame, labels: Sequence[str], metric: str, of: str = "network") -> np.ndarray:
    """The least and the largest of some trainings at each layer, `[2, layer]`."""
    curves = np.array([curve(table, label, metric, of) for label in labels])
    return np.stack([curves.min(0), curves.max(0)])


def report(table: pl.DataFrame) -> str:
    """A table in Markdown: what each training has by layer, and at the last layer as pure attention."""
    titles = (
        "training", "what it is", "relative residual, from layer 0", "its spread at the last", "relative mu, last",
        "entropy, from layer 1", "attention and norms, last", "attention alone, last",
    )  # fmt: skip
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    known = {training.label: training.what for training in TRAININGS} | {UNTRAINED: "the default design, five seeds"}
    for label, what in known.items():
        whole = curve(table, label, "relative_residual")
        last = curve(table, label, "relative_residual", column="sd")[-1]
        mu, entropy = curve(table, label, "relative_mu")[-1], curve(table, label, "entropy")
        alone = [curve(table, label, "relative_residual", of, "log10")[-1] for of in ("san+norm", "san")]
        cells = [label, what, by_layer(whole, 3), f"{last:.3f}", f"{mu:.3f}", by_layer(entropy, 2)]
        lines.append(f"| {' | '.join([*cells, *(small(log10) for log10 in alone)])} |")
    return "\n".join(lines)


def by_layer(values: Sequence[float], digits: int) -> str:
    """Numbers one after the other."""
    return " · ".join(f"{value:.{digits}f}" for value in values)


def small(log10: float) -> str:
    """A number by its logarithm: in full, or as a power of ten."""
    return f"{10**log10:.3f}" if log10 > -2 else f"1e{log10:.1f}"


class Verdict(NamedTuple):
    """A prediction of docs/trained.md, in a few words, and what came."""

    expected: str
    numbers: str
    holds: bool


def verdicts(table: pl.DataFrame) -> list[Verdict]:
    """What came of each prediction, in their order."""

    def last(label: str, metric: str = "relative_residual") -> float:
        return curve(table, label, metric)[-1]

    wide = [t.label for t in TRAININGS if t.group != SIZES]
    full = [t.label for t in TRAININGS if t.group not in (ONE, SIZES) and not t.label.startswith("CDR3")]
    lowest, untrained = min(wide, key=last), last(UNTRAINED)
    low, high = spread(table, SAME, "relative_residual")
    width = float(high[-1] - low[-1])
    gaps = [last("masked only") - last("default"), last("CDR3, masked only") - last("CDR3")]
    second = {label: curve(table, label, "relative_residual")[2] for label in full}
    least = min(second, key=lambda label: second[label])
    default = np.array(curve(table, "default", "relative_residual"))
    moved = [float(np.abs(np.array(curve(table, label, "relative_residual")) - default).max())
             for label in ("shuffled", "synthetic")]  # fmt: skip
    three = [t.label for t in TRAININGS if t.label != "width 128"]
    alone = {label: curve(table, label, "relative_residual", "san", "log10")[-1] for label in three}
    highest = max(alone, key=lambda label: alone[label])
    rank = correlation([last(label) for label in three], [alone[label] for label in three])
    sharp = [(float(np.mean(curve(table, a, "entropy"))), float(np.mean(curve(table, b, "entropy"))))
             for a, b in (("masked only", "default"), ("CDR3, masked only", "CDR3"))]  # fmt: skip
    widths = [last(label) for label in ("width 16", "width 32", "default")]
    return [
        Verdict("training keeps tokens apart", f"least {last(lowest):.3f} ({lowest}); untrained {untrained:.3f}",
                last(lowest) > untrained),
        Verdict("filling in alone keeps them further apart",
                f"{gaps[0]:+.3f} and {gaps[1]:+.3f} (CDR3); the five alike span {width:.3f}", min(gaps) > width),
        Verdict("average pooling is lowest at layer 2", f"lowest is {least}, {second[least]:.3f}",
                least == "average pooling"),
        Verdict("data move no layer by 0.05", f"shuffled {moved[0]:.3f}, synthetic {moved[1]:.3f}", max(moved) < 0.05),
        Verdict("attention alone ends below 0.05, in another order",
                f"highest {small(alone[highest])} ({highest}); rank correlation {rank:.2f}",
                alone[highest] < math.log10(0.05) and rank < 0.5),
        Verdict("filling in alone attends more sharply",
                "mean entropy " + ", ".join(f"{a:.2f} for {b:.2f}" for a, b in sharp), all(a < b for a, b in sharp)),
        Verdict("it rises with width 16, 32, 64", by_layer(widths, 3), widths == sorted(widths)),
    ]  # fmt: skip


def correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation, of numbers that all differ."""
    ranks = [np.argsort(np.argsort(values)) for values in (first, second)]
    matrix = np.asarray(np.corrcoef(ranks))
    return float(matrix[0, 1])


def charts(table: pl.DataFrame) -> list[fig.Chart]:
    """How far apart tokens are by layer, of all loops and of CDR3 alone; below, entropy and attention alone."""
    shown = ("default", "masked only", "average pooling", "dropout noise", "fine-tuned", UNTRAINED)
    bands = {"default": SAME, UNTRAINED: untrained_names(table)}
    names = {"default": "default (band: five alike)", UNTRAINED: "untrained (band: seeds)"}

    def line(label: str, metric: str, index: int, of: str = "network", name: str | None = None) -> fig.Line:
        logs = of == "san"
        y = curve(table, label, metric, of, "log10" if logs else "mean")
        x = list(range(1 if metric == "entropy" else 0, 4))
        band = [tuple(spread(table, bands[label], metric, of))] if label in bands and not logs else []
        colour = "faint" if label == UNTRAINED else fig.line_colour(index)
        return fig.Line(x, y, colour, name, label, index, "index", "dash" if label == UNTRAINED else "solid",
                        bands=[(low, high) for low, high in band])  # fmt: skip

    layers, apart = fig.Axis("layer", last=3), fig.Axis("relative residual", range=(0.55, 1.06))
    whole = [line(label, "relative_residual", index, name=names.get(label, label)) for index, label in enumerate(shown)]
    cdr3 = [line(label, "relative_residual", index) for index, label in enumerate(("CDR3", "CDR3, masked only"))]
    entropy = [line(label, "entropy", index) for index, label in enumerate(shown)]
    alone = [line(label, "relative_residual", index, "san") for index, label in enumerate(shown)]
    alone.append(line("left-aligned", "relative_residual", len(shown), "san"))
    powers = fig.Powers([value for each in alone for value in each.y])
    rows = [
        [fig.Panel(layers, apart, whole, "all loops"), fig.Panel(layers, apart, cdr3, "CDR3 alone")],
        [fig.Panel(fig.Axis("layer", labels={1: "1", 2: "2", 3: "3"}), fig.Axis(ENTROPY, from_zero=True), entropy,
                   "all loops"),
         fig.Panel(layers, fig.Axis("relative residual", powers), alone, "attention alone (on top: left-aligned)")],
    ]  # fmt: skip
    alt = "How far apart tokens of receptors are, by layer, in trainings of one encoder and untrained"
    data = table.to_dict(as_series=False)
    return [fig.Chart(panels, data, alt, shared=True, size=(4.6, 3.2)) for panels in rows]


def main() -> None:
    """Run one of the commands of the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "draw"))
    parser.add_argument("table", type=Path)
    parser.add_argument("--receptors", type=Path, help="a file of measured receptors; drawn ones if left out")
    parser.add_argument("-o", "--output", type=Path, default=Path("trained_encoders.png"))
    options = parser.parse_args()
    if options.command == "run":
        run(options.table, read_receptors(options.receptors) if options.receptors else draw_receptors())
        return
    table = pl.read_csv(options.table)
    options.output.write_bytes(png(rendered(plot(*charts(table)))))
    print(report(table), "", "| expected | came | so |", "|---|---|---|", sep="\n")
    for each in verdicts(table):
        print(f"| {each.expected} | {each.numbers} | {'yes' if each.holds else 'no'} |")


if __name__ == "__main__":
    main()

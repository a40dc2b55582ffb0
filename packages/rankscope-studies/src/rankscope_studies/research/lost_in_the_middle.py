"""Which tokens the last one comes from: the closed form of Chowdhury (2026), random networks and trained ones.

python -m rankscope_studies.research.lost_in_the_middle run TABLE.csv  # half an hour of one core; goes on where it was
python -m rankscope_studies.research.lost_in_the_middle draw TABLE.csv -o FIGURE.png  # and prints the differences

Predictions, and what would refute them. Where attention is uniform and values are the identity, shares are those of
the exact law at any number of tokens, to rounding: refuted by a difference above 1e-12. Where values are random, paths
do not add up as the published density has it, but by their squares: refuted if, in networks whose tokens have unit
size, sizes of terms are nearer to the published weights, on average over seeds. (That was seen first on one seed.)
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import polars as pl
import torch
from torch import Tensor

from rankscope import decompose, load
from rankscope.figures import plot
from rankscope.files import atomic
from rankscope.lab import NextCharacter, Recipe, Training
from rankscope.nets import Transformer
from rankscope.sources import bundled_excerpts, fresh, preset
from rankscope_studies.chowdhury2026 import (
    attention_weights,
    cumulative,
    exact_weights,
    independent_sizes,
    uniform_network,
)
from rankscope_studies.research.positions_figure import ROW, positions_chart

TOKENS, SEEDS, WIDTH, HEADS = 64, (0, 1, 2), 256, 4
DEPTHS = (6, 12, 24)
FAMILIES = {"GPT-2": ("gpt2", HEADS), "Llama": ("llama-1b", HEADS // 2)}
"""By name: the preset whose block it is, and its heads of keys."""
SPREADS = {"small tokens": 0.02, "unit tokens": 1.0}  # Standard deviations of the entries of random tokens
TRAINED, TRAINED_SEEDS, STEPS = (6, 12), (0, 1), 600
CONTINUUM = ((6, 0.1), (6, 0.5), (12, 0.1), (12, 0.5), (12, 0.9), (24, 0.1))
"""(layers, a) at which the continuum is compared with the exact law."""


def rows(
    model: str, layers: int, seed: int, net: Transformer, X: Tensor, padding: Tensor | None = None, last: bool = True
) -> pl.DataFrame:
    """A row for each source: its share and the size of its term, means over samples, and what theory has of them.

    Args:
        model: What the network is called.
        layers: How many layers it has.
        seed: Of its weights.
        net: The network.
        X: Its tokens.
        padding: True at padding.
        last: Whether the output is that of the last token, and theory speaks of it; of all tokens otherwise.
    """
    d = decompose(net.to(torch.float64), X.double(), padding)
    terms = d.by_position(-1 if last else None, sizes=True).table.filter(start="embedding")
    terms = terms.with_columns(pl.col("norm") / pl.col("norm").sum().over("sample"))
    means = terms.group_by("source").agg(pl.col("share").mean(), pl.col("norm").mean().alias("size")).sort("source")
    theory: dict[str, list[float] | None] = {"published": None, "independent": None}
    if last:
        a = attention_weights(d.frozen)
        sizes = independent_sizes(len(means), a)
        theory["published"] = exact_weights(len(means), [float(np.mean(a))] * layers).tolist()
        theory["independent"] = (sizes / sizes.sum()).tolist()
    return means.select(
        pl.lit(model).alias("model"), pl.lit(layers).alias("layers"), pl.lit(seed).alias("seed"), "source",
        pl.col("share").round(9), pl.col("size").round(9),
        *(pl.Series(name, values, pl.Float64).round(9) if values else pl.lit(None, pl.Float64).alias(name)
          for name, values in theory.items()),
    )  # fmt: skip


def initialised(family: str, tokens: str, layers: int, seed: int) -> pl.DataFrame:
    """The rows of a network at its initialisation, N(0, 0.02), on random tokens."""
    kind, key_heads = FAMILIES[family]
    arch = replace(
        preset(kind), layers=layers, width=WIDTH, heads=HEADS, key_heads=key_heads, head_width=WIDTH // HEADS,
        value_width=WIDTH // HEADS, mlp_width=4 * WIDTH,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1000 + seed)
    X = SPREADS[tokens] * torch.randn(1, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    return rows(f"{family}, {tokens}", layers, seed, fresh(arch, seed), X)


def trained(layers: int, steps: int = STEPS, samples: int = 8) -> Iterator[pl.DataFrame]:
    """The rows of small GPTs that learn the next character of Moby Dick, before and after."""
    task = NextCharacter(context=TOKENS)
    training = Training(
        task, task.architecture(layers, 64), Recipe(steps=steps, lr=3e-3), seeds=TRAINED_SEEDS, monitored=False
    )
    for state in ("small GPT before training", "small GPT trained"):
        tokens, padding = training.tokens(samples)
        for seed, net, X in zip(TRAINED_SEEDS, training.networks(), tokens, strict=True):
            yield rows(state, layers, seed, net, X, padding)
        training.finish()
    print(f"{layers} layers, held out:", training.evaluate(), f"a guess: {task.blind:.2f}", flush=True)


def minilm(samples: int = 8) -> pl.DataFrame:
    """The rows of MiniLM, which reads in both directions, for the output of all tokens."""
    net = load("minilm")
    X, padding = net.encode(bundled_excerpts(128)[:samples], TOKENS)
    return rows("MiniLM, all tokens", net.arch.layers, 0, net, X, padding, last=False)


def run(table: Path) -> None:
    """Measure the networks that the table does not have yet."""
    parts = [pl.read_csv(table)] if table.exists() else []
    done = {row for part in parts for row in part.select("model", "layers", "seed").unique().iter_rows()}

    def keep(part: pl.DataFrame) -> None:
        parts.append(part)
        with atomic(table) as path:
            pl.concat(parts).write_csv(path)
        print(*part.row(0)[:3], flush=True)

    for family, tokens, layers, seed in product(FAMILIES, SPREADS, DEPTHS, SEEDS):
        if (f"{family}, {tokens}", layers, seed) not in done:
            keep(initialised(family, tokens, layers, seed))
    if ("MiniLM, all tokens", 6, 0) not in done:
        keep(minilm())
    for layers in TRAINED:
        if ("small GPT trained", layers, TRAINED_SEEDS[-1]) not in done:
            keep(pl.concat(trained(layers)))


def by_paths(tokens: int, layers: int, a: float) -> np.ndarray:
    """The share of each source token by the sum over paths, in the network with uniform attention."""
    d = decompose(uniform_network(layers, a), torch.ones(1, tokens, 1, dtype=torch.float64))
    shares: np.ndarray = d.by_position().table.filter(start="embedding")["share"].to_numpy()
    return shares


def continuum(sizes: tuple[int, ...] = (32, 128, 512, 2048), points: tuple[tuple[int, float], ...] = CONTINUUM) -> str:
    """A table in Markdown: paths against the exact law, and the exact law against the published density.

    Token j of n has the published mass of ((j-1) / n, j / n].
    """
    lines = [
        "| layers | a | tokens | paths − exact | cumulative weight: published − exact, at most | weight of the first "
        "token: published, exact | of tokens from n/10 on: published / exact − 1, at most |",
        "|---|---|---|---|---|---|---|",
    ]
    for (layers, a), n in product(points, sizes):
        weights, exact, x = by_paths(n, layers, a), exact_weights(n, [a] * layers), np.arange(1, n + 1) / n
        published = cumulative(x, [a] * layers)
        gap = np.abs(published - np.cumsum(exact))
        relative = np.abs(np.diff(published, prepend=0.0) / exact - 1)
        lines.append(
            f"| {layers} | {a:g} | {n} | {np.abs(weights - exact).max():.0e} | {gap.max():.4f} "
            f"(token {gap.argmax() + 1}) | {published[0]:.4f}, {exact[0]:.4f} | {relative[x >= 0.1].max():.1%} |"
        )
    return "\n".join(lines)


def differences(table: pl.DataFrame) -> str:
    """A table in Markdown: sizes and shares beside both theories, the mean over seeds and its range."""
    lines = [
        "| network | layers | size: off published | off independent | share: off published | of the last token: share,"
        " published | of the first: share, published |",
        "|---|---|---|---|---|---|---|",
    ]
    for (model, layers), mine in table.group_by("model", "layers", maintain_order=True):
        found: dict[str, list[float]] = {}
        for _, seed in mine.sort("source").group_by("seed"):
            size, share, published, independent = (
                seed[name].to_numpy() for name in ("size", "share", "published", "independent")
            )
            numbers = {
                "published": np.abs(size - published).sum() / 2, "independent": np.abs(size - independent).sum() / 2,
                "share": np.abs(np.cumsum(share - published)).max(), "last": share[-1], "last_published": published[-1],
                "first": share[0], "first_published": published[0],
            }  # fmt: skip
            for name, value in numbers.items():
                found.setdefault(name, []).append(float(value))
        cells = [_spread(found[name]) for name in ("published", "independent", "share")]
        ends = [f"{_spread(found[name])}, {_spread(found[name + '_published'])}" for name in ("last", "first")]
        lines.append(f"| {model} | {layers} | {' | '.join([*cells, *ends])} |")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    """The mean, and the range where there are several."""
    if not np.isfinite(values).all():
        return "–"
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    """Run one of the commands of the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "draw"))
    parser.add_argument("table", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("lost_in_the_middle.png"))
    options = parser.parse_args()
    if options.command == "run":
        run(options.table)
        return
    table = pl.read_csv(options.table)
    paths = pl.concat(
        pl.DataFrame({"layers": layers, "source": range(TOKENS), "share": by_paths(TOKENS, layers, 0.1)})
        for layers in DEPTHS
    )
    chart = positions_chart(paths, 0.1, table)
    rows = [replace(chart, panels=chart.panels[start : start + ROW]) for start in range(0, len(chart.panels), ROW)]
    plot(*rows).savefig(options.output, dpi=110)
    print(continuum())
    print(differences(table))


if __name__ == "__main__":
    main()

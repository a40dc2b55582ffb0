"""Figure 2: BERT, untrained and trained, five variants under four masks.

Each network keeps its weights; parts are taken out (`VARIANTS`) and the mask is changed (`MASKS`). mu is
drawn by layer as in the paper, and beside it mu / ||X||_F: at BERT's initialisation values and outputs
together multiply tokens by about 0.3 a layer, so that mu falls without any averaging. Every network is
run as it is used, in deviation arithmetic, and as it is trained, with dropout of 0.1 in float64.
"""

import math
from collections.abc import Collection
from itertools import product
from typing import Any

import polars as pl

from rankscope.figures.matplotlib import Axes, Figure
from rankscope.figures.text import power
from rankscope.nets import Transformer
from rankscope.sources import fresh
from rankscope.studies.study import Comparison, Setup, Study, StudyResult
from rankscope.studies.wu2024 import networks
from rankscope.studies.wu2024.networks import COLLAPSE, MASKS, MISSING, UNTRAINED, VARIANTS, last, powers
from rankscope.studies.wu2024.panels import TEX, by_layer, geometric, grid, key, looks, powers_of_ten, title

EQUAL = -2.0
"""log10 of mu / ||X||_F below which tokens are said to have become the same."""
By = tuple[str, Collection[str]]
"""A column of the table, and what of it is drawn, in order."""


def _run(setup: Setup) -> StudyResult:
    samples = 200 if setup.full else 2
    models = networks.trained(setup)
    nets = {UNTRAINED: fresh("bert-base", device=setup.device), **models}
    table = pl.concat([curves(setup, name, net, samples) for name, net in nets.items()])
    figures = {networks.part(name).lower(): figure_of(table.filter(network=name), name) for name in nets}
    comparisons = [comparison for name in nets for comparison in _compared(table.filter(network=name), name)]
    notes = [
        f"{samples} excerpts of 128 tokens. Lines are geometric means over them. {networks.said_of(models)}",
        MISSING,
        "Dropout off: deviation arithmetic, which resolves any mu. Dropout on: 0.1, float64, one fixed draw.",
    ]
    return StudyResult(figures, {"collapse": table}, comparisons, notes)


def curves(setup: Setup, name: str, net: Transformer, samples: int) -> pl.DataFrame:
    """Every variant under every mask, with and without dropout."""
    X = networks.tokens_of(net, networks.excerpts(samples))
    return networks.of_network(name, networks.swept(setup, net, X, name, excerpts=samples))


def figure_of(table: pl.DataFrame, name: str, lowest: float = -math.inf) -> Figure:
    """A column for each variant, a line for each mask."""
    figure, first = collapse_figure(table, ("variant", VARIANTS), ("mask", MASKS), 3.0, lowest=lowest)
    key(figure, first, name, {"dropout off": "-", "dropout on": "--"})
    return figure


def collapse_figure(
    table: pl.DataFrame, panels: By, lines: By, width: float, lowest: float = -math.inf, **look: Any
) -> tuple[Figure, Axes]:
    """mu above, mu / ||X||_F below, by layer; dashed with dropout. Also the panel that has all labels."""
    depth = int(table["layer"].max())  # type: ignore[arg-type]
    figure, axes = grid(2, len(panels[1]), width=width, height=2.9)
    for row, measured in enumerate(COLLAPSE):
        for panel, shown in zip(axes[row], panels[1], strict=True):
            part = table.filter(pl.col(panels[0]) == shown, metric=measured).sort("sample", "layer")
            for (k, label), dropout in product(enumerate(lines[1]), (False, True)):
                logs = part.filter(pl.col(lines[0]) == label, dropout=dropout)["log10"].to_numpy()
                if not len(logs):
                    continue
                line = {**looks(k, 3.5, 1.7), "label": label, "zorder": 3, **look}
                if dropout:
                    line |= {"linestyle": "--", "linewidth": 1.1, "marker": None, "label": None, "zorder": 2}
                mean = geometric(logs.reshape(-1, depth + 1))
                panel.plot(range(depth + 1), mean, markevery=max(1, depth // 12), **line)
            powers_of_ten(panel, lowest)
            by_layer(panel, depth)
            if row == 0:
                title(panel, shown)
        axes[row][0].set_ylabel(TEX[measured])
    return figure, axes[0][0]


def _compared(table: pl.DataFrame, name: str) -> list[Comparison]:
    depth = int(table["layer"].max())  # type: ignore[arg-type]
    off = table.filter(~pl.col("dropout"))
    ends = {m: last(off, "mu", variant="SAN", mask=m) for m in MASKS}
    shares = {m: last(off, "relative_mu", variant="SAN", mask=m) for m in MASKS}
    begin = float(table.filter(metric="mu", layer=0, dropout=False)["log10"].mean())  # type: ignore[arg-type]
    order = sorted(MASKS, key=lambda mask: shares[mask])
    fallen = all(end < begin - 2 for end in ends.values())
    return [
        Comparison(
            f"{name}: SAN collapses under every mask",
            "mu falls exponentially (Thm 1)",
            f"mu from {power(begin)} to {powers(ends)} at layer {depth}; relative: {powers(shares)}",
            fallen,
            "criterion: mu falls a hundredfold. "
            + (
                "Relative to ||X||_F local masks have hardly begun: what falls is mostly the tokens' size"
                if fallen
                else f"{depth} layers are few for these masks, and trained values do not shrink tokens"
            ),
        ),
        Comparison(
            f"{name}: local masks are slower",
            "different masks have different rates, local ones smaller (Thm 1)",
            f"relative mu at layer {depth}, smallest first: {', '.join(order)}",
            order[:2] == ["complete", "causal"],
        ),
        _plateau(table, name, depth),
        _kept_apart(off, name, depth),
    ]


def _plateau(table: pl.DataFrame, name: str, depth: int) -> Comparison:
    """The published plateau of SAN + LN belongs to dropout."""
    which = {"variant": "SAN + LN", "mask": "complete"}
    off = last(table, "relative_mu", **which, dropout=False)
    on = last(table, "relative_mu", **which, dropout=True) if table["dropout"].any() else math.nan
    ours = f"relative mu at layer {depth}: {power(off)} with dropout off, {power(on)} with dropout on"
    why = ""
    if off <= EQUAL:
        why = (
            "the plateau is dropout's: it makes tokens different in every layer. Without it LN alone does "
            "not stop the collapse under the complete mask"
        )
    claim, agrees = "with LN alone mu no longer goes to zero", off > EQUAL
    if name != UNTRAINED:
        claim, agrees = "LN prevents the collapse together with other parts", off <= EQUAL
    return Comparison(f"{name}: SAN + LN, complete mask", claim, ours, agrees, why)


def _kept_apart(off: pl.DataFrame, name: str, depth: int) -> Comparison:
    """With skips nothing collapses at this depth."""
    least = networks.least_with_skips(off)
    return Comparison(
        f"{name}: variants with a skip",
        "drawn, and no number given",
        f"smallest relative mu of any mask at layer {depth}: {powers(least)}",
        None,
        "none of them collapses" if all(x > EQUAL for x in least.values()) else "",
    )


FIG2 = Study(
    "wu2024", "fig2", "BERT, five variants under four masks, dropout off and on (Figure 2)", _run, seconds=62.0
)

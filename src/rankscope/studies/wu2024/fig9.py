"""Figure 9: the cosines between the tokens that a network starts from.

Corollary 1 asks that all initial pairwise cosines be at least 0; then LayerNorm does not prevent the
collapse under any mask with a centre, given orthogonal values. How often real inputs are so is what this
figure shows.
"""

import numpy as np
import polars as pl
from torch import Tensor

from rankscope.figures.matplotlib import Figure
from rankscope.figures.style import INK, PALETTE
from rankscope.metrics.cosine import cosines
from rankscope.sources import fresh
from rankscope.studies.study import Comparison, Setup, Study, StudyResult
from rankscope.studies.wu2024.networks import MISSING, excerpts, part, said_of, tokens_of, trained
from rankscope.studies.wu2024.panels import grid, title

BINS = np.linspace(-1, 1, 81)


def _run(setup: Setup) -> StudyResult:
    samples = 200 if setup.full else 20
    models = trained(setup)
    nets = {**models, "BERT untrained": fresh("bert-base", device=setup.device)}
    table = pl.concat(
        [
            setup.cached(
                part(name), lambda net=net: angles(tokens_of(net, excerpts(samples))), excerpts=samples
            ).select(pl.lit(name).alias("network"), pl.all())
            for name, net in nets.items()
        ]
    )
    comparisons = [_compared(table.filter(network=name), name) for name in nets]
    notes = [
        f"{samples} excerpts of 128 tokens, layer 0: what the first block gets. {said_of(models)}",
        MISSING,
        "The untrained embedding is word + position + segment, each drawn at random: the segment, common to "
        "all tokens, alone makes every cosine about a third.",
    ]
    return StudyResult({"fig9": _figure(table, list(nets))}, {"cosines": table}, comparisons, notes)


def angles(X: Tensor) -> pl.DataFrame:
    """Pairs by bin of cosine for each input, with the smallest cosine and the share below zero."""
    rows = []
    for sample, tokens in enumerate(X):
        matrix, pairs = cosines(tokens)
        values = matrix[pairs].cpu().numpy()
        counts, _ = np.histogram(values, BINS)
        columns = {
            "sample": sample,
            "least": float(values.min()),
            "negative": float((values < 0).mean()),
            "mean": float(values.mean()),
        }
        rows += [{**columns, "cosine": float(low), "pairs": int(k)} for low, k in zip(BINS, counts, strict=False)]
    return pl.DataFrame(rows)


def _compared(table: pl.DataFrame, name: str) -> Comparison:
    inputs = table.group_by("sample").agg(pl.col("least", "negative", "mean").first())
    holds = float((inputs["least"] >= 0).mean())  # type: ignore[arg-type]
    negative, mean, least = (float(inputs[c].mean()) for c in ("negative", "mean", "least"))  # type: ignore[arg-type]
    return Comparison(
        f"{name}: initial cosines",
        "shown as a figure; Cor 1 asks for none below 0",
        f"{holds:.0%} of inputs have none below 0; {negative:.1%} of pairs are below 0, mean cosine "
        f"{mean:.2f}, smallest {least:.2f} on average",
        None,
        "Cor 1 applies" if holds == 1 else "Cor 1 does not apply to the inputs with cosines below 0",
    )


def _figure(table: pl.DataFrame, names: list[str]) -> Figure:
    figure, rows = grid(1, len(names), width=3.9, height=3.2)
    for axes, name in zip(rows[0], names, strict=True):
        total = table.filter(network=name).group_by("cosine").agg(pl.col("pairs").sum()).sort("cosine")
        share = total["pairs"] / total["pairs"].sum()
        below = total["cosine"].to_numpy() < -1e-9
        for chosen, colour, label in ((below, PALETTE[1], "below 0"), (~below, PALETTE[0], "0 and above")):
            low, high = total["cosine"].to_numpy()[chosen], share.to_numpy()[chosen]
            axes.bar(low, high, width=BINS[1] - BINS[0], align="edge", color=colour, label=label)
        axes.set_axisbelow(True)
        axes.axvline(0, color=INK, linewidth=0.8)
        title(axes, name, xlabel=r"$\cos(x_i, x_j)$ at layer 0", xlim=(-0.5, 1))
    rows[0][0].set_ylabel("share of pairs")
    rows[0][0].legend(fontsize=8, frameon=False)
    return figure


FIG9 = Study("wu2024", "fig9", "initial pairwise cosines (Figure 9)", _run, seconds=14.0)

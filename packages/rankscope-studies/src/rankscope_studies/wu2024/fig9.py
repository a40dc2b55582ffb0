"""Figure 9: the cosines between the tokens that a network starts from.

Corollary 1 asks that all initial pairwise cosines be at least 0; then LayerNorm does not prevent the collapse under any
mask with a centre, given orthogonal values. How often real inputs are so is what this figure shows.
"""

import numpy as np
import polars as pl
from torch import Tensor

from rankscope.figures import INK, PALETTE, Figure, panels
from rankscope.metrics import cosines
from rankscope_studies.study import Comparison, Setup, Study, StudyResult, StudyTexts
from rankscope_studies.wu2024.networks import PAPER, StudyInputs, file_name, note_values, of_network
from rankscope_studies.wu2024.panels import title

BINS = np.linspace(-1, 1, 81)
TEXTS = StudyTexts("wu2024", "fig9")


def _run(setup: Setup, inputs: StudyInputs = PAPER) -> StudyResult:
    samples = 200 if setup.full else 20
    models = inputs.trained(setup)
    tables = {}
    for name, net in {**models, **inputs.bert(setup)}.items():
        X = inputs.tokens(net, samples)
        tables[name] = of_network(name, setup.cached(file_name(name), lambda X=X: angles(X), excerpts=samples))
    comparisons = [_compared(table, name) for name, table in tables.items()]
    notes = TEXTS.notes(samples=samples, **note_values(models))
    return StudyResult({"fig9": _figure(tables)}, {"cosines": pl.concat(tables.values())}, comparisons, notes)


def angles(X: Tensor) -> pl.DataFrame:
    """Pairs by bin of cosine for each input, with the smallest cosine and the share below zero."""
    rows = []
    for sample, tokens in enumerate(X):
        matrix, pairs = cosines(tokens)
        values = matrix[pairs].cpu().numpy()
        counts, _ = np.histogram(values, BINS)
        least, negative, mean = float(values.min()), float((values < 0).mean()), float(values.mean())
        columns = {"sample": sample, "least": least, "negative": negative, "mean": mean}
        rows += [{**columns, "cosine": float(low), "pairs": int(k)} for low, k in zip(BINS, counts, strict=False)]
    return pl.DataFrame(rows)


def _compared(table: pl.DataFrame, name: str) -> Comparison:
    inputs = table.group_by("sample").agg(pl.col("least", "negative", "mean").first())
    holds = float((inputs["least"] >= 0).mean())  # type: ignore[arg-type]
    negative, mean, least = (float(inputs[c].mean()) for c in ("negative", "mean", "least"))  # type: ignore[arg-type]
    why = "Cor 1 applies" if holds == 1 else "Cor 1 does not apply to the inputs with cosines below 0"
    return TEXTS.compare("cosines", None, name=name, holds=holds, negative=negative, mean=mean, least=least, why=why)


def _figure(tables: dict[str, pl.DataFrame]) -> Figure:
    figure, row = panels(len(tables), width=3.9, height=3.2)
    for axes, (name, table) in zip(row, tables.items(), strict=True):
        total = table.group_by("cosine").agg(pl.col("pairs").sum()).sort("cosine")
        share = total["pairs"] / total["pairs"].sum()
        below = total["cosine"].to_numpy() < -1e-9
        for chosen, colour, label in ((below, PALETTE[1], "below 0"), (~below, PALETTE[0], "0 and above")):
            low, high = total["cosine"].to_numpy()[chosen], share.to_numpy()[chosen]
            axes.bar(low, high, width=BINS[1] - BINS[0], align="edge", color=colour, label=label)
        axes.set_axisbelow(True)
        axes.axvline(0, color=INK, linewidth=0.8)
        title(axes, name, xlabel=r"$\cos(x_i, x_j)$ at layer 0", xlim=(-0.5, 1))
    row[0].set_ylabel("share of pairs")
    row[0].legend(fontsize=8, frameon=False, loc="best")
    return figure


STUDY = Study("wu2024", "fig9", "initial pairwise cosines (Figure 9)", _run, seconds=14.0)

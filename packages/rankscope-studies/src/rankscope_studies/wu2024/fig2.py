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

from rankscope.figures import Axes, Figure, panels, power
from rankscope_studies.study import Comparison, Setup, Study, StudyResult, StudyTexts
from rankscope_studies.wu2024 import networks
from rankscope_studies.wu2024.networks import COLLAPSE, MASKS, PAPER, UNTRAINED, VARIANTS, StudyInputs, last, powers
from rankscope_studies.wu2024.panels import TEX, by_layer, geometric, legend_below, line_style, powers_of_ten, title

EQUAL = -2.0  # log10 of mu / ||X||_F below which tokens are said to have become the same
By = tuple[str, Collection[str]]  # A column of the table, and what of it is drawn, in order
TEXTS = StudyTexts("wu2024", "fig2")


def _run(setup: Setup, inputs: StudyInputs = PAPER) -> StudyResult:
    samples = 200 if setup.full else 2
    models = inputs.trained(setup)
    tables = {}
    for name, net in {**inputs.bert(setup), **models}.items():
        curves = networks.swept(setup, net, inputs.tokens(net, samples), name, excerpts=samples)
        tables[name] = networks.of_network(name, curves)
    figures = {networks.file_name(name).lower(): figure_of(table, name) for name, table in tables.items()}
    comparisons = [comparison for name, table in tables.items() for comparison in _compared(table, name)]
    notes = TEXTS.notes(samples=samples, **networks.note_values(models))
    return StudyResult(figures, {"collapse": pl.concat(tables.values())}, comparisons, notes)


def figure_of(table: pl.DataFrame, name: str, lowest: float = -math.inf) -> Figure:
    """A column for each variant, a line for each mask."""
    figure, first = collapse_figure(table, ("variant", VARIANTS), ("mask", MASKS), 3.0, lowest=lowest)
    legend_below(figure, first, name, {"dropout off": "-", "dropout on": "--"})
    return figure


def collapse_figure(
    table: pl.DataFrame, by_panel: By, by_line: By, width: float, lowest: float = -math.inf, **look: Any
) -> tuple[Figure, Axes]:
    """Draw mu above, mu / ||X||_F below, by layer, dashed with dropout: the figure, and the panel that has all labels.

    Args:
        table: Rows of `networks.collapse`.
        by_panel: The column that panels of a row differ by.
        by_line: The column that lines of a panel differ by.
        width: Of a panel.
        lowest: log10 at which vertical axes end at the latest.
        look: Options of all lines.
    """
    depth = int(table["layer"].max())  # type: ignore[arg-type]
    figure, axes = panels(len(by_panel[1]), width=width, height=2.9, rows=2)
    for panel, (measured, shown) in zip(axes, product(COLLAPSE, by_panel[1]), strict=True):
        part = table.filter(pl.col(by_panel[0]) == shown, metric=measured).sort("sample", "layer")
        for (k, label), dropout in product(enumerate(by_line[1]), (False, True)):
            logs = part.filter(pl.col(by_line[0]) == label, dropout=dropout)["log10"].to_numpy()
            if not len(logs):
                continue
            line = {**line_style(k, 3.5, 1.7), "label": label, "zorder": 3, **look}
            if dropout:
                line |= {"linestyle": "--", "linewidth": 1.1, "marker": None, "label": None, "zorder": 2}
            mean = geometric(logs.reshape(-1, depth + 1))
            panel.plot(range(depth + 1), mean, markevery=max(1, depth // 12), **line)
        powers_of_ten(panel, lowest)
        by_layer(panel, depth)
        if measured == COLLAPSE[0]:
            title(panel, shown)
    for first, measured in zip(axes[:: len(by_panel[1])], COLLAPSE, strict=True):
        first.set_ylabel(TEX[measured])
    return figure, axes[0]


def _compared(table: pl.DataFrame, name: str) -> list[Comparison]:
    depth = int(table["layer"].max())  # type: ignore[arg-type]
    off = table.filter(~pl.col("dropout"))
    ends, shares = ({m: last(off, metric, variant="SAN", mask=m) for m in MASKS} for metric in COLLAPSE)
    begin = float(table.filter(metric="mu", layer=0, dropout=False)["log10"].mean())  # type: ignore[arg-type]
    order = sorted(MASKS, key=lambda mask: shares[mask])
    fallen = all(end < begin - 2 for end in ends.values())
    least = networks.least_with_skips(off)
    common = {"name": name, "depth": depth}
    return [
        TEXTS.compare(
            "collapse", fallen, **common, begin=power(begin), ends=powers(ends), shares=powers(shares),
            why=TEXTS.sentence("collapse", "fallen" if fallen else "few_layers", depth=depth),
        ),
        TEXTS.compare("local", order[:2] == ["complete", "causal"], **common, order=", ".join(order)),
        _plateau(table, name, depth),
        TEXTS.compare(
            "skips", None, **common, least=powers(least),
            why="none of them collapses" if all(x > EQUAL for x in least.values()) else "",
        ),
    ]  # fmt: skip


def _plateau(table: pl.DataFrame, name: str, depth: int) -> Comparison:
    """A plateau of SAN + LN, as published, is there with dropout on, and not with dropout off."""
    which = {"variant": "SAN + LN", "mask": "complete"}
    off = last(table, "relative_mu", **which, dropout=False)
    on = last(table, "relative_mu", **which, dropout=True) if table["dropout"].any() else math.nan
    claim, agrees = ("untrained", off > EQUAL) if name == UNTRAINED else ("trained", off <= EQUAL)
    return TEXTS.compare(
        "plateau", agrees, name=name, depth=depth, claim=TEXTS.sentence("plateau", claim), off=power(off), on=power(on),
        why=TEXTS.sentence("plateau", "dropout") if off <= EQUAL else "",
    )  # fmt: skip


STUDY = Study(
    "wu2024", "fig2", "BERT, five variants under four masks, dropout off and on (Figure 2)", _run, seconds=62.0
)

"""The figure of a depth card: what is lost without each layer, what passes through it, how it adds, and its heads."""

import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from rankscope import figures as fig
from rankscope.figures import TURNS
from rankscope.paths import LABELLED

if TYPE_CHECKING:
    from rankscope.figures import Figure

BARS = {
    "lost": ("the output", 0), "lost_residual": ("what tells tokens apart", 4),
    "share": ("the output", 0), "residual_share": ("what tells tokens apart", 4),
}  # fmt: skip
"""Columns that are drawn as bars: their names in the legend, and the numbers of their colours."""
LINES = {"cosine_attention": ("attention", 1), "cosine_mlp": ("MLP", 2), "cosine": ("the layer", 3)}
"""Columns that are drawn as lines: the same, in other colours."""
NUMBERED = 8  # Heads in a row up to which each square of the map has room for its number
ROW = 2  # Panels in a row
SENTENCE_WIDTH = 115  # Characters of a line of the sentence above the figure


def depth_chart(layers: pl.DataFrame, heads: pl.DataFrame, sentence: str) -> fig.Chart:
    """Four panels of a card's tables of layers and heads: losses, shares, cosines by layer, and a map of heads;
    `sentence` is what the card says."""
    last = int(layers["layer"].to_numpy().max(initial=1))
    across = fig.Axis("layer", last=last, range=(0.4, last + 0.6))
    changes, shares = _bars(layers, ("lost", "lost_residual")), _bars(layers, ("share", "residual_share"))
    panels = [fig.Panel(across, fig.Axis("change of the output", percent=True), changes, CHANGES)]
    if shares:
        panels.append(fig.Panel(across, fig.Axis("", percent=True), shares, PASSES))
    panels.append(fig.Panel(across, fig.Axis("cosine"), _lines(layers), ADDS))
    panels.append(_head_map(heads))
    table, alt = layers.to_dict(as_series=False), f"By layer and head. {sentence}"
    return fig.Chart(panels, table, alt, columns=ROW, size=(5.2, 3.1), height=300)


def _bars(layers: pl.DataFrame, names: tuple[str, ...]) -> list[fig.Bars]:
    numbers, marks = layers["layer"].to_list(), []
    for name in names:
        values = layers[name].to_numpy()
        if np.isfinite(values).any():
            label, colour = BARS[name]
            texts = zip(numbers, values, strict=True)
            hover: list[fig.Hover] = [(f"layer {layer}\n", f"{value:.1%}", f" of {label}") for layer, value in texts]
            marks.append(fig.Bars(numbers, values, fig.line_colour(colour), label, hover))
    return marks


def _lines(layers: pl.DataFrame) -> list[fig.Line]:
    numbers = layers["layer"].to_list()
    marks = [fig.Line([0.4, max(numbers) + 0.6], [0.0, 0.0], "faint", width=1.0)]
    for name, (label, index) in LINES.items():
        values = layers[name].to_numpy()
        if np.isfinite(values).any():
            texts, colour = zip(numbers, values, strict=True), fig.line_colour(index)
            hover: list[fig.Hover] = [(f"layer {k}, {label}\n", f"{v:+.3f}", "") for k, v in texts]
            marks.append(fig.Line(numbers, values, colour, label, index=index, marker="dot", hover=hover))
    return marks


CHANGES, PASSES, ADDS = (
    "what changes without the layer", "what passes through the layer", "what the layer adds, along the stream"
)  # fmt: skip
HEADS = {
    "lost": "what changes without the head",
    "share": "share of the output through the head",
    "entropy": "entropy of the head",
}
"""Columns of heads that are drawn, the first that is known, and what each is."""
CAPTIONS = {
    CHANGES: "Changes are norms of the difference over that of the whole: of the output, and of its residual, "
    "which tells tokens apart.",
    PASSES: "A share may be negative: what passes through the layer subtracts.",
    ADDS: "Cosines are of what attention, the MLP and the layer add with the stream that they add to, mean over "
    "tokens.",
    HEADS["lost"]: "In the map, the output changes so much without each head; grey: no more than rounding.",
    HEADS["share"]: "In the map, that share of the output passes through each head: blue adds to it, orange takes away "
    "from it. Heads were not taken out one by one.",
    HEADS["entropy"]: "The map has the entropy of each head's attention, in nats. Heads were not taken out one by one.",
}
"""What is to be known of each panel, by its heading."""


def caption(chart: fig.Chart) -> str:
    """The text under the figure in a report: a sentence for each of its panels."""
    return " ".join(CAPTIONS[str(panel.heading)] for panel in chart.panels)


def _head_map(heads: pl.DataFrame) -> fig.Panel:
    """What is lost without each head or, where that was not measured, what passes through it."""
    column = next((name for name in HEADS if heads[name].is_not_null().any()), "entropy")
    across, up = (heads[name].unique().sort().to_list() for name in ("head", "layer"))
    rows = {(row["layer"], row["head"]): row for row in heads.iter_rows(named=True)}
    grid = [[rows.get((layer, head), {}) for head in across] for layer in up]  # of a damaged table some are missing
    values = np.array([[cell.get(column) for cell in row] for row in grid], dtype=float)
    noise = np.array([[column == "lost" and bool(cell.get("lost_below_floor")) for cell in row] for row in grid])
    largest = float(np.abs(values[np.isfinite(values)]).max(initial=0.0)) or 1.0
    signed = column == "share"
    cells = fig.Heatmap(
        across, up, values, range=(-largest if signed else 0.0, largest), signed=signed, noise=noise,
        numbers=len(across) <= NUMBERED and values.size <= LABELLED,
        hover=[[(f"layer {layer}, head {head}\n", f"{value:.3g}", "") for head, value in zip(across, row, strict=True)]
               for layer, row in zip(up, values, strict=True)],
    )  # fmt: skip
    return fig.Panel(
        fig.Axis("head", last=across[-1], range=(-0.5, across[-1] + 0.5), grid=False),
        fig.Axis("layer", last=up[-1], range=(up[0] - 0.5, up[-1] + 0.5), grid=False), [cells], HEADS[column],
    )  # fmt: skip


def printed(chart: fig.Chart, sentence: str = "", **options: Any) -> "Figure":
    """The chart in print, two panels in a row, under the sentence if one is given; `options` are those of `plot`."""
    from rankscope.figures import plot

    rows = [replace(chart, panels=chart.panels[start : start + ROW]) for start in range(0, len(chart.panels), ROW)]
    figure = plot(*rows, **options)
    if sentence:
        shown = sentence.translate(TURNS).replace("$", r"\$")
        figure.suptitle("\n".join(textwrap.wrap(shown, SENTENCE_WIDTH)), x=0.01, ha="left", fontsize=10)
    return figure

"""The figure of a depth card: what is lost without each layer, what passes through it, how it adds, and its heads."""

import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from rankscope.figures import description as fig
from rankscope.figures.escaping import TURNS
from rankscope.paths.figures import LABELLED

if TYPE_CHECKING:
    from rankscope.figures.matplotlib import Figure

BARS = {
    "lost": ("the output", 0), "lost_residual": ("what tells tokens apart", 4),
    "share": ("of the output", 0), "residual_share": ("of what tells tokens apart", 4),
}  # fmt: skip
"""Columns that are drawn as bars: their names in the legend, and the numbers of their colours."""
LINES = {"cosine_attention": "attention", "cosine_mlp": "MLP", "cosine": "the layer"}
ROW = 2  # Panels in a row
SENTENCE_WIDTH = 115  # Characters of a line of the sentence above the figure


def depth_chart(layers: pl.DataFrame, heads: pl.DataFrame, sentence: str) -> fig.Chart:
    """Four panels: losses, shares, cosines by layer, and a map of heads.

    Args:
        layers: The card's table of layers.
        heads: Its table of heads.
        sentence: What the card says.
    """
    last = layers.height
    across = fig.Axis("layer", last=last, range=(0.4, last + 0.6))
    panels = [
        fig.Panel(across, fig.Axis("change of the output", percent=True), _bars(layers, ("lost", "lost_residual")),
                  "what changes without the layer"),
    ]  # fmt: skip
    shares = _bars(layers, ("share", "residual_share"))
    if shares:
        panels.append(fig.Panel(across, fig.Axis("share", percent=True), shares, "what passes through the layer"))
    panels.append(fig.Panel(across, fig.Axis("cosine"), _lines(layers), "what the layer adds, along the stream"))
    panels.append(_head_map(heads))
    return fig.Chart(
        panels,
        layers.to_dict(as_series=False),
        f"By layer and head. {sentence}",
        columns=ROW,
        size=(5.2, 3.1),
        height=300,
    )


def _bars(layers: pl.DataFrame, names: tuple[str, ...]) -> list[fig.Bars]:
    marks = []
    for name in names:
        values = layers[name].to_numpy()
        if np.isfinite(values).any():
            label, colour = BARS[name]
            hover: list[fig.Hover] = [
                (f"layer {layer}\n", f"{value:.1%}", f" {label}") for layer, value in enumerate(values, 1)
            ]
            marks.append(fig.Bars(layers["layer"].to_list(), values, fig.line_colour(colour), label, hover))
    return marks


def _lines(layers: pl.DataFrame) -> list[fig.Line]:
    numbers, marks = layers["layer"].to_list(), []
    for index, (name, label) in enumerate(LINES.items()):
        values = layers[name].to_numpy()
        if np.isfinite(values).any():
            hover: list[fig.Hover] = [(f"layer {k}, {label}\n", f"{v:+.3f}", "") for k, v in enumerate(values, 1)]
            marks.append(
                fig.Line(numbers, values, fig.line_colour(index), label, index=index, marker="dot", hover=hover)
            )
    zero = fig.Line([0.4, layers.height + 0.6], [0.0, 0.0], "faint", width=1.0)
    return [zero, *marks]


def _head_map(heads: pl.DataFrame) -> fig.Panel:
    """What is lost without each head or, where that was not measured, what passes through it."""
    column = "lost" if heads["lost"].is_not_null().any() else "share"
    signed = column == "share" and heads["share"].is_not_null().any()
    column = column if signed or column == "lost" else "entropy"
    across, up = (heads[name].unique().sort().to_list() for name in ("head", "layer"))
    values = heads.sort("layer", "head")[column].to_numpy().reshape(len(up), len(across)).astype(float)
    noise = None
    if column == "lost":
        noise = heads.sort("layer", "head")["lost_below_floor"].fill_null(False).to_numpy().reshape(values.shape)
    largest = float(np.nanmax(np.abs(values), initial=0.0)) or 1.0
    titles = {
        "lost": "what changes without the head", "share": "share of the output through the head",
        "entropy": "entropy of the head",
    }  # fmt: skip
    cells = fig.Heatmap(
        across, up, values, range=(-largest if signed else 0.0, largest), signed=signed, noise=noise,
        numbers=values.size <= LABELLED,
        hover=[[(f"layer {layer}, head {head}\n", f"{values[i, j]:.3g}", "") for j, head in enumerate(across)]
               for i, layer in enumerate(up)],
    )  # fmt: skip
    return fig.Panel(
        fig.Axis("head", last=len(across) - 1, range=(-0.5, len(across) - 0.5), grid=False),
        fig.Axis("layer", last=up[-1], range=(up[0] - 0.5, up[-1] + 0.5), grid=False), [cells], titles[column],
    )  # fmt: skip


def printed(chart: fig.Chart, sentence: str = "", **options: Any) -> "Figure":
    """The chart in print, two panels in a row, under the sentence if one is given; `options` are those of `plot`."""
    from rankscope.figures.plot import plot

    rows = [replace(chart, panels=chart.panels[start : start + ROW]) for start in range(0, len(chart.panels), ROW)]
    figure = plot(*rows, **options)
    if sentence:
        shown = sentence.translate(TURNS).replace("$", r"\$")
        figure.suptitle("\n".join(textwrap.wrap(shown, SENTENCE_WIDTH)), x=0.01, ha="left", fontsize=10)
    return figure

"""The figure of a depth card: what is lost without each layer, what passes through it, how it adds, and its heads.

`positions_chart` is that of the tokens that outputs come from (`chowdhury2026.py`).
"""

import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from rankscope.depths.chowdhury2026 import density
from rankscope.figures import description as fig
from rankscope.figures.escaping import TURNS
from rankscope.paths.figures import LABELLED

if TYPE_CHECKING:
    from rankscope.figures.matplotlib import Figure

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
    """Four panels: losses, shares, cosines by layer, and a map of heads.

    Args:
        layers: The card's table of layers.
        heads: Its table of heads.
        sentence: What the card says.
    """
    last = int(layers["layer"].to_numpy().max(initial=1))
    across = fig.Axis("layer", last=last, range=(0.4, last + 0.6))
    panels = [
        fig.Panel(across, fig.Axis("change of the output", percent=True), _bars(layers, ("lost", "lost_residual")),
                  CHANGES),
    ]  # fmt: skip
    shares = _bars(layers, ("share", "residual_share"))
    if shares:
        panels.append(fig.Panel(across, fig.Axis("", percent=True), shares, PASSES))
    panels.append(fig.Panel(across, fig.Axis("cosine"), _lines(layers), ADDS))
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
            numbers = layers["layer"].to_list()
            hover: list[fig.Hover] = [
                (f"layer {layer}\n", f"{value:.1%}", f" of {label}")
                for layer, value in zip(numbers, values, strict=True)
            ]
            marks.append(fig.Bars(numbers, values, fig.line_colour(colour), label, hover))
    return marks


def _lines(layers: pl.DataFrame) -> list[fig.Line]:
    numbers, marks = layers["layer"].to_list(), []
    for name, (label, index) in LINES.items():
        values = layers[name].to_numpy()
        if np.isfinite(values).any():
            hover: list[fig.Hover] = [
                (f"layer {k}, {label}\n", f"{v:+.3f}", "") for k, v in zip(numbers, values, strict=True)
            ]
            marks.append(
                fig.Line(numbers, values, fig.line_colour(index), label, index=index, marker="dot", hover=hover)
            )
    zero = fig.Line([0.4, max(numbers) + 0.6], [0.0, 0.0], "faint", width=1.0)
    return [zero, *marks]


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


POSITION = "source token, over the last"


def positions_chart(paths: pl.DataFrame, a: float, models: pl.DataFrame) -> fig.Chart:
    """Which source tokens the last one comes from: six panels, theory beside networks.

    Args:
        paths: layers · source · share of networks with uniform attention, by sums over paths.
        a: Their weight of attention.
        models: model · layers · seed · source · share · size · published · independent of networks at their
            initialisation and trained; lines are means over seeds, bands go from the least to the largest.
    """
    deep = models.filter(pl.col("layers") == 12)
    families = {family: [f"{family}, {tokens}" for tokens in ("unit tokens", "small tokens")]
                for family in ("GPT-2", "Llama")}  # fmt: skip
    small = {(name, layers): models.filter(model=name, layers=layers)
             for name in ("small GPT before training", "small GPT trained") for layers in (6, 12)}  # fmt: skip
    trained = {f"{name}, {layers} layers": rows for (name, layers), rows in small.items()}
    random = {name: deep.filter(model=name) for names in families.values() for name in names}
    both_ways = {"MiniLM, all tokens": models.filter(model="MiniLM, all tokens")}
    panels = [_uniform_panel(paths, a)]
    for family, names in families.items():
        marks = []
        for index, name in enumerate(names):
            rows = random[name]
            marks += _profiles(rows, "size", index, name.partition(", ")[2])
            marks += _profiles(rows, "published", index, "published density" if index == 0 else None, "dash")
            marks += _profiles(rows, "independent", index, "independent paths" if index == 0 else None, "dot")
        panels.append(_sizes_panel(marks, f"{family} at initialisation, 12 layers"))
    marks = []
    for index, (name, rows) in enumerate(trained.items()):
        marks += _profiles(rows, "size", index, name.replace("small GPT ", ""))
    marks += _profiles(small["small GPT trained", 12], "published", 3, "published for trained, 12 layers", "dash")
    panels.append(_sizes_panel(marks, "small GPTs, before and after"))
    quarters = {k / 4: f"{k / 4:.0%}" for k in range(5)}
    up = fig.Axis("share of this and earlier tokens", range=(-0.05, 1.65), labels=quarters)  # The legend is above
    random.pop("Llama, unit tokens")  # Its shares are those of GPT-2, line upon line
    for shown, heading in (
        (random, "shares at initialisation (dashed: published density)"),
        (trained | both_ways, "shares before and after training"),
    ):
        lines: list[fig.Line] = []
        for index, (name, rows) in enumerate(shown.items()):
            lines += _profiles(rows, "share", index, name.replace("small GPT ", ""), logs=False)
            if shown is random:
                lines += _profiles(rows, "published", index, None, "dash", logs=False)
        panels.append(fig.Panel(fig.Axis(POSITION, range=(-0.02, 1.04)), up, lines, heading))
    return fig.Chart(
        panels, models.to_dict(as_series=False),
        "Which source tokens the last one comes from: with uniform attention as predicted, in random networks and in "
        "trained ones.",
        columns=ROW, size=(5.2, 3.6), height=320,
    )  # fmt: skip


def _uniform_panel(paths: pl.DataFrame, a: float) -> fig.Panel:
    """The published density beside the exact shares, times the number of tokens n; rings are its mass at the last.

    Token j stands at the middle of ((j-1) / n, j / n].
    """
    x = np.linspace(0.004, 1.0, 400)
    marks: list[fig.Line | fig.Points] = []
    for index, ((layers,), rows) in enumerate(paths.group_by("layers", maintain_order=True)):
        n, colour, weights = len(rows), fig.line_colour(index), [a] * int(str(layers))
        logs = np.log10(n * rows["share"].to_numpy())
        places = (rows["source"].to_numpy() + 0.5) / n
        last = np.log10(n * (1 - a) ** len(weights))
        hover: list[fig.Hover] = [
            (f"{layers} layers, token {k + 1} of {n}\n", f"{10**y:.3g}", "") for k, y in enumerate(logs)
        ]
        marks.append(fig.Line(x, np.log10(density(x, weights)), colour, f"{layers} layers", width=1.4))
        marks.append(fig.Points(places, logs, colour, size=4.0, hover=hover))
        marks.append(fig.Points(places[-1:], [last], colour, size=11.0, hollow=np.ones(1, dtype=bool)))
    powers = fig.Powers([y for mark in marks for y in mark.y])
    return fig.Panel(fig.Axis(POSITION, range=(-0.02, 1.04)), fig.Axis("density", powers), marks,
                     f"uniform attention, a = {a:g}: density, and sums over paths")  # fmt: skip


def _sizes_panel(marks: list[fig.Line], heading: str) -> fig.Panel:
    powers = fig.Powers([y for mark in marks for y in mark.y])
    return fig.Panel(
        fig.Axis(POSITION, range=(-0.02, 1.04)), fig.Axis("size of the term, mean 1", powers), marks, heading
    )


def _profiles(
    rows: pl.DataFrame, column: str, index: int, name: str | None, dash: str = "solid", logs: bool = True
) -> list[fig.Line]:
    """The mean over seeds of a column by source, times the number of tokens, in log10; or added up from the first."""
    if not len(rows):
        return []
    grid = rows.sort("seed", "source")[column].to_numpy().reshape(rows["seed"].n_unique(), -1)
    n = grid.shape[1]
    grid = n * grid if logs else np.cumsum(grid, 1)
    middle, low, high = (np.log10(y) if logs else y for y in (grid.mean(0), grid.min(0), grid.max(0)))
    places = np.arange(1, n + 1) / n
    hover: list[fig.Hover] = [(f"{name or column}, token {k + 1} of {n}\n", f"{10**y if logs else y:.3g}", "")
                              for k, y in enumerate(middle)]  # fmt: skip
    bands = [(low, high)] if dash == "solid" and len(grid) > 1 else []
    width = 1.8 if dash == "solid" else 1.2
    return [fig.Line(places, middle, fig.line_colour(index), name, dash=dash, width=width, bands=bands, hover=hover)]


def printed(chart: fig.Chart, sentence: str = "", **options: Any) -> "Figure":
    """The chart in print, two panels in a row, under the sentence if one is given; `options` are those of `plot`."""
    from rankscope.figures.plot import plot

    rows = [replace(chart, panels=chart.panels[start : start + ROW]) for start in range(0, len(chart.panels), ROW)]
    figure = plot(*rows, **options)
    if sentence:
        shown = sentence.translate(TURNS).replace("$", r"\$")
        figure.suptitle("\n".join(textwrap.wrap(shown, SENTENCE_WIDTH)), x=0.01, ha="left", fontsize=10)
    return figure

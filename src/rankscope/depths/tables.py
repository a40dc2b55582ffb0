"""What the tables of a depth card come to: means over samples, effective depths, a sentence, and cells of text that are
the same in a terminal, a notebook and the report; and the figure: what is lost without each layer, what passes
through it, how it adds, and its heads.

`card.py` makes the tables and calls the functions of this file.
"""

import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import polars as pl

from rankscope import figures as fig
from rankscope.extras import counted
from rankscope.figures import TURNS
from rankscope.paths import LABELLED

MARKS = ("lost_below_floor", "lost_residual_below_floor", "rank_doubtful")
"""Columns that say whether rounding may have decided a number."""
MOST_OF_IT = 0.95  # The part of all losses that the layers of `layers_for_most` have
LITTLE = 0.01  # The change of the output below which a head can be spared


class EffectiveDepth(NamedTuple):
    """How deep a network works by one definition, which can be computed again from `DepthCard.layers`."""

    name: str
    value: float | None  # None where the columns that it is made of are not known
    layers: int
    definition: str

    @property
    def sentence(self) -> str:
        """The number with its definition."""
        in_layers = "not known" if self.value is None else f"{self.value:.3g} of {self.layers}"
        return f"{self.name.replace('_', ' ')}: {in_layers} ({self.definition})"


def means(table: pl.DataFrame, *place: str) -> pl.DataFrame:
    """A table by sample as means over the samples that have a number. A mark stands where all that have one are
    marked; ranks are doubtful where any is."""
    marks = [name for name in table.columns if name in MARKS]
    numbers = [name for name in table.columns if name not in (*place, *marks, "sample")]
    marked = [pl.col(name).any() if name == "rank_doubtful" else pl.col(name).all() for name in marks]
    grouped = table.group_by(*place, maintain_order=True).agg(pl.col(numbers).mean(), *marked)
    # A mark of what nobody measured is none.
    silent = {"lost_below_floor": "lost", "lost_residual_below_floor": "lost_residual"}
    unknown = [pl.when(pl.col(silent[name]).is_null()).then(None).otherwise(pl.col(name)).alias(name)
               for name in marks if name in silent]  # fmt: skip
    return grouped.with_columns(unknown).select(column for column in table.columns if column != "sample")


def effective_depths(layers: pl.DataFrame) -> list[EffectiveDepth]:
    """How deep the network works, by each definition, from `DepthCard.layers`."""
    count = layers.height
    lost = resolved_losses(layers)
    total = sum(lost)
    p = [loss / total for loss in lost] if total else []
    even = math.exp(-sum(q * math.log(q) for q in p if q > 0)) if p else None
    most, taken = 0, 0.0
    for share in sorted(p, reverse=True):
        if taken < MOST_OF_IT:
            most, taken = most + 1, taken + share
    lengths = layers["share_attention"]
    mean_length = None if lengths.null_count() else float(lengths.sum())
    cosines = layers["cosine"].to_list()
    opposed = [layer for layer, cosine in enumerate(cosines, 1) if cosine is None or cosine <= 0]
    composing = max(opposed, default=0)
    return [
        EffectiveDepth("layers_that_count", even, count,
                       "e to the entropy of lost / sum of lost: as many layers would count if all counted alike"),
        EffectiveDepth("layers_for_most", float(most) if p else None, count,
                       f"the fewest layers whose lost is {MOST_OF_IT:.0%} of the sum of lost"),
        EffectiveDepth("mean_path_length", mean_length, count,
                       "the sum of share_attention: heads on a path, each path weighed by its share of the output"),
        EffectiveDepth("last_opposing_layer", float(composing), count,
                       "the last layer whose cosine with the stream is not above 0; all later ones add along it"),
    ]  # fmt: skip


def resolved_losses(layers: pl.DataFrame) -> list[float]:
    """What is lost without each layer, 0 where rounding may change the output as much."""
    pairs = layers.select("lost", "lost_below_floor").iter_rows()
    return [0.0 if lost is None or noise else lost for lost, noise in pairs]


def sentence_of(name: str, layers: pl.DataFrame, heads: pl.DataFrame) -> str:
    """What the card of a model of this name says, from its tables of layers and heads."""
    lost = resolved_losses(layers)
    even = effective_depths(layers)[0].value
    begin = f"{name}: {counted(layers.height, 'layer')}"
    if even is None:
        return f"{begin}; without any one of them the output changes by no more than rounding."
    most, least = (pick(range(len(lost)), key=lost.__getitem__) for pick in (max, min))
    words = [f"{begin} count as {even:.1f}" if layers.height > 1 else begin]
    words.append(f"without layer {most + 1} the output changes most, by {in_percent(lost[most])}")
    if layers.height > 1:
        words[-1] += f", without layer {least + 1} least, by {in_percent(lost[least])}"
    known = heads.filter(pl.col("lost").is_not_null())
    if known.height:
        spared = known.filter(pl.col("lost_below_floor") | (pl.col("lost") < LITTLE)).height
        least_of_heads = in_percent(float(known["lost"].min() or 0.0))  # type: ignore[arg-type]
        words.append(
            f"{spared} of {known.height} heads change it by less than {LITTLE:.0%} each" if spared
            else f"each of {known.height} heads changes it by at least {least_of_heads}"
        )  # fmt: skip
    return "; ".join(words) + "."


def in_percent(share: float) -> str:
    """A share in percent, with two digits where it is small.

    >>> in_percent(0.123), in_percent(0.0123), in_percent(12.3), in_percent(0.0)
    ('12%', '1.2%', '1,230%', '0%')
    """
    if share == 0:
        return "0%"
    return f"{share:,.0%}" if share >= 0.1 else f"{share:.1%}" if share >= 0.001 else f"{share:.1g}"


Row = Mapping[str, Any]
SHOWN_HEADS = 5  # Heads that are shown at either end
NOISE = " ○"  # After a number that rounding may have decided


def _number(name: str, form: str = "+z.2f") -> Callable[[Row], str]:
    return lambda row: "–" if row[name] is None else f"{row[name]:{form}}"


def _marked(name: str, mark: str, say: Callable[[float], str] = in_percent) -> Callable[[Row], str]:
    return lambda row: "–" if row[name] is None else f"{say(row[name])}{NOISE if row[mark] else ''}"


HEAD_CELLS: dict[str, Callable[[Row], str]] = {
    "layer": lambda row: str(row["layer"]),
    "head": lambda row: str(row["head"]),
    "lost": _marked("lost", "lost_below_floor"),
    "of res": _marked("lost_residual", "lost_residual_below_floor"),
    "share": _number("share"),
    "at res": _number("residual_share"),
    "cosine": _number("cosine"),
    "entropy": _number("entropy", ".2f"),
    "sink": _number("sink", ".2f"),
}
"""Headings of the table of heads, each with what stands in a row under it."""
LAYER_CELLS: dict[str, Callable[[Row], str]] = {
    **{heading: cell for heading, cell in HEAD_CELLS.items() if heading != "head"},
    "influence": _number("influence", ".3f"),
    "rank": _marked("rank", "rank_doubtful", "{:.4g}".format),
}
"""The same of layers."""
ALL_LAYER_CELLS: dict[str, Callable[[Row], str]] = {
    **LAYER_CELLS,
    "attention": _number("share_attention"),
    "MLP": _number("share_mlp"),
    "biases": _number("share_bias"),
    "sinks": _number("sink_heads", ".0%"),
}
"""With parts of the share, and the heads that have a sink, where there is room."""


MARKED_COLUMNS = {"lost": "lost_below_floor", "of res": "lost_residual_below_floor", "rank": "rank_doubtful"}
"""Headings whose numbers rounding may have decided, with the column of a card's table that says so."""
LEAVES = ("sinks", "biases", "MLP", "attention", "entropy", "sink", "rank", "influence", "cosine")
"""The columns that go where there is little room, in this order."""


def norms_sentence(norms: pl.DataFrame) -> str:
    """What norms do to the affine rank of the tokens."""
    if norms.is_empty():
        return "There are no norms."
    changed = norms.filter(pl.col("rank_before") != pl.col("rank_after"))
    doubt = " Rounding may have decided some ranks (○)." if norms["rank_doubtful"].any() else ""
    if changed.is_empty():
        return f"Each of {norms.height} norms keeps the affine rank of the tokens.{doubt}"
    steps = [f"{row['norm_name']} of layer {row['layer']} ({row['rank_before']:.4g} to {row['rank_after']:.4g})"
             for row in changed.head(3).iter_rows(named=True)]  # fmt: skip
    more = f" and {changed.height - 3} more" if changed.height > 3 else ""
    return f"{changed.height} of {norms.height} norms change the affine rank: {', '.join(steps)}{more}.{doubt}"


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

"""What the tables of a depth card come to: means over samples, effective depths, a sentence, and cells of text that are
the same in a terminal, a notebook and the report.

`card.py` makes the tables and calls the functions of this file.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import polars as pl

from rankscope.extras import counted

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

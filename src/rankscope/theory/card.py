"""What certificates show of themselves: a card in a notebook, a few lines in a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import polars as pl

from rankscope.cards import card, counted, lines
from rankscope.theory.views import RANK, BoundView, DepthView, quantity

if TYPE_CHECKING:
    from rankscope.figures.matplotlib import Figure

HEADINGS = ("theorem", "of", "layers", "at layer", "measured", "", "bound", "slack")


def certificates_repr(bounds: Sequence[BoundView], samples: int) -> str:
    """A line per theorem whose hypotheses are met from layer 1 on: what is measured, and the bound."""
    rows = [
        [view.theorem, quantity(view.quantity).symbol, f"layer {view.layer}",
         f"{view.measured}{', ' if view.state == 'vacuous' else f' {view.sign} '}{view.proved}"]
        for view in bounds
        if view.met_to
    ]  # fmt: skip
    return lines(_title(bounds, samples), rows)


def certificates_card(bounds: Sequence[BoundView], table: pl.DataFrame, broken: int) -> str:
    """Bounds and measurement in a figure, and the theorems whose hypotheses are met from layer 1 on."""
    rows = [
        [view.theorem, quantity(view.quantity).symbol, view.layers, str(view.layer), view.measured,
         view.sign, view.proved, view.slack]
        for view in bounds
        if view.met_to
    ]  # fmt: skip
    drawable = table.filter(pl.col("met") & (pl.col("quantity") != RANK))

    def draw() -> "Figure":
        from rankscope.figures.plot import plot
        from rankscope.theory.figures import bounds_chart

        return plot(bounds_chart(table, int(drawable["sample"][0])))

    notes = ["Slack in decades. Figure: the first sample; table: the loosest."] if rows else []
    unmet = [view.theorem for view in bounds if not view.met_to]
    if unmet:
        notes.append(f"Hypotheses not met: {', '.join(unmet)}. summary() says which and why.")
    if broken:
        notes.append("A measurement contradicts a theorem: please report this network.")
    return card(
        _title(bounds, table["sample"].n_unique()),
        None if drawable.is_empty() else draw,
        HEADINGS,
        rows,
        notes,
    )


def _title(bounds: Sequence[BoundView], samples: int) -> str:
    """How much was asked and how much of it applies."""
    met = sum(view.met_to > 0 for view in bounds)
    return (
        f"Certificates: {counted(len(bounds), 'theorem')}, hypotheses of {met} met, "
        f"{counted(samples, 'sample')}"
    )


def depth_repr(depth: DepthView) -> str:
    """What was measured, and what is proved."""
    return lines(f"CollapseDepth to {depth.threshold:g}: {depth.uniform}", _proved(depth))


def depth_card(depth: DepthView) -> str:
    """What was measured, and what each theorem proves of every sample."""
    rows = _proved(depth)
    notes = [] if rows else ["No theorem proves or excludes it for every sample."]
    title, headings = depth_repr(depth).splitlines()[0], ("theorem", "proves tokens", "for every sample")

    def draw() -> "Figure":
        from rankscope.figures.plot import plot
        from rankscope.theory.figures import depth_chart

        return plot(depth_chart(depth))

    return card(title, draw if rows else None, headings, rows, notes)


def _proved(depth: DepthView) -> list[list[str]]:
    says = {"upper": ("uniform", "by layer"), "lower": ("apart", "not up to layer")}
    return [[name, says[kind][0], f"{says[kind][1]} {layer}"] for name, kind, layer in depth.proved]

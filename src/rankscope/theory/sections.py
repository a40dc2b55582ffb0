"""What certificates are shown as: what theorems say beside what is measured, and which hypotheses fail."""

from collections.abc import Mapping

import polars as pl

from rankscope.figures import sparklines
from rankscope.results import Plot, Section, Table, sentence
from rankscope.theory.figures import bounds_chart
from rankscope.theory.views import QUANTITIES, RANK, BoundView, failed_hypotheses, quantity


def overview(title: str, said: str, bounds: list[BoundView], table: pl.DataFrame, broken: int) -> Section:
    """The theorems whose hypotheses are met from layer 1 on, with the figure of the first sample."""
    met = [view for view in bounds if view.met_to]
    rows = [
        [view.theorem, view.layers, str(view.layer), quantity(view.quantity).short, view.measured, view.sign,
         view.proved, view.slack]
        for view in met
    ]  # fmt: skip
    drawable = table.filter(pl.col("met") & (pl.col("quantity") != RANK))
    plots = [] if drawable.is_empty() else [Plot("bounds", [("", bounds_chart(table, int(drawable["sample"][0])))])]
    notes = ["A measurement contradicts a theorem: please report this network."] if broken else []
    unmet = [view.theorem for view in bounds if not view.met_to]
    if unmet:
        notes.append(f"Hypotheses not met: {', '.join(unmet)}. summary() says which and why, print() all of it.")
    quantities = [quantity(name) for name in QUANTITIES if name in {view.quantity for view in met}]
    note = "   ".join(f"{shown.short}: {shown.symbol}" for shown in quantities)
    note += "\nSlack in decades. Figure: the first sample; table: the loosest." if rows else ""
    headings = ("theorem", "layers", "at", "of", "measured", "", "bound", "slack")
    lines = ["\n".join(sparklines(*zip(*view.by_layer, strict=True))) for view in met]
    shown = Table("", headings, rows, note=note, curves=("by layer", lines), spare=["layers", "by layer"])
    return Section(title, said, plots, [shown], notes)


def bounds_section(proved: Mapping[str, tuple[pl.DataFrame, list[BoundView], int]]) -> Section:
    """What is proved of each variant, from its table, its views, and how many guarantees are contradicted."""
    plots, tables, notes = [], [], []
    for k, (variant, (table, bounds, broken)) in enumerate(proved.items()):
        if (table["quantity"] != RANK).any():
            caption = sentence("bounds", "caption", variant=variant)
            plots.append(Plot(f"bounds-{k}", [("", bounds_chart(table))], caption))
        tables += [certificate_table(bounds, table, variant), failing_table(table, variant)]
        if broken:
            notes.append(sentence("bounds", "contradicted", variant=variant))
    shown = [table for table in tables if table.rows]
    return Section("What is proved", sentence("bounds", "lead"), plots, shown, notes, key="bounds")


def certificate_table(bounds: list[BoundView], table: pl.DataFrame, variant: str) -> Table:
    """A line per theorem that holds somewhere: at which layers, what it says at the last at which it says
    something, next to the measurement. Those that hold nowhere are named beneath."""
    rows = [
        [view.theorem, quantity(view.quantity).symbol, view.layers, str(view.layer), view.measured,
         f"{view.sign} {view.proved}" if view.state == "says" else view.proved, view.slack]
        for view in bounds
        if view.met_to
    ]  # fmt: skip
    none = [view.theorem for view in bounds if not view.met_to]
    headings = ["theorem", "of", "holds at layers", "at layer", "measured", "proved", "slack, decades"]
    notes = (
        ["Vacuous: the theorem holds, but its bound says nothing new (as large as the tokens, or zero)."]
        if rows
        else []
    )
    if rows and table["sample"].n_unique() > 1:
        notes.append("Numbers are those of the excerpt with the most slack.")
    if none:
        notes.append(f"A hypothesis fails from the first layer on, see below: {', '.join(none)}.")
    return Table(f"Certificates: {variant}", headings, rows, note=" ".join(notes))


def failing_table(table: pl.DataFrame, variant: str) -> Table:
    """A line per hypothesis that fails somewhere: its number, its limit, and the theorems it takes out."""
    rows = [
        [hypothesis.says, hypothesis.number, hypothesis.limit, ", ".join(hypothesis.theorems)]
        for hypothesis in failed_hypotheses(table)
    ]
    headings = ["hypothesis", "found", "must be", "so not"]
    return Table(f"Hypotheses that fail: {variant}", headings, rows, wordy=True, folded=True)

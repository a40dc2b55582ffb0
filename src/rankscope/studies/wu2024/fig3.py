"""Figures 3 and 7: the temperature. Scores are divided by sqrt(d_QK); a smaller divisor slows the collapse.

Pure attention, `softmax(X W_Q (X W_K)^T / sqrt(d_QK))`, nothing else changed. A small divisor makes
attention sharp: a token listens to few others, itself among them where it scores highest, and averages
less. The paper's values of d_QK are not in its text; these span both readings (1/64, 1 and 64 as d_QK or
as the divisor itself).
"""

from itertools import pairwise

import polars as pl

from rankscope.figures.matplotlib import Figure
from rankscope.figures.text import power
from rankscope.nets import Transformer
from rankscope.sources import fresh
from rankscope.studies.study import Comparison, Setup, Study, StudyResult
from rankscope.studies.wu2024 import networks
from rankscope.studies.wu2024.fig2 import collapse_figure
from rankscope.studies.wu2024.networks import MASKS, MISSING, UNTRAINED
from rankscope.studies.wu2024.panels import key

DIVISORS = {"1/64": 1 / 64, "1/8": 1 / 8, "1": 1.0, "8": 8.0, "64": 64.0}
"""sqrt(d_QK); BERT's own is 8, MiniLM's, with heads half as wide, 5.7."""


def _run(setup: Setup) -> StudyResult:
    samples = 50 if setup.full else 2
    models = networks.trained(setup)
    nets = {UNTRAINED: fresh("bert-base", device=setup.device), **models}
    table = pl.concat([curves(setup, name, net, samples) for name, net in nets.items()])
    figures = {networks.part(name).lower(): figure_of(table.filter(network=name), name) for name in nets}
    sharp = pl.concat([sharpness(setup, name, net, samples) for name, net in nets.items()])
    largest = {name: float(sharp.filter(network=name, divisor="1/8")["largest_weight"][0]) for name in nets}
    comparisons = [
        _slower(table.filter(network=name, mask=mask), name, mask, largest[name]) for name in nets for mask in MASKS
    ]
    notes = [
        f"Pure attention (SAN, no norm), {samples} excerpts of 128 tokens, deviation arithmetic. "
        f"{networks.said_of(models)}",
        MISSING,
    ]
    return StudyResult(figures, {"divisor": table, "sharpness": sharp}, comparisons, notes)


def curves(setup: Setup, name: str, net: Transformer, samples: int) -> pl.DataFrame:
    """Pure attention under every mask with every divisor."""
    X = networks.tokens_of(net, networks.excerpts(samples))
    tables = []
    for mask in MASKS:
        for label, divisor in DIVISORS.items():
            table = setup.cached(
                networks.part(name, mask, f"{divisor:g}"),
                lambda m=mask, by=divisor: networks.collapse(net, X, "SAN", m, divisor=by),
                excerpts=samples,
            )
            tables.append(table.with_columns(pl.lit(label).alias("divisor")))
    return networks.of_network(name, pl.concat(tables))


def sharpness(setup: Setup, name: str, net: Transformer, samples: int) -> pl.DataFrame:
    """The largest weight of a row of attention, the mean over rows, heads and layers, complete mask."""

    def compute() -> pl.DataFrame:
        X = networks.tokens_of(net, networks.excerpts(min(samples, 2)))
        rows = []
        for label, divisor in DIVISORS.items():
            pure = net.variant("san").variant(mask="complete", divisor=divisor)
            attention = [step.attention for step in pure.steps(X) if step.attention is not None]
            weights = [float(P.amax(-1).mean()) for P in attention]
            rows.append({"divisor": label, "largest_weight": sum(weights) / len(weights)})
        return pl.DataFrame(rows)

    return networks.of_network(name, setup.cached(networks.part(name, "sharpness"), compute, excerpts=samples))


def _slower(table: pl.DataFrame, name: str, mask: str, largest: float) -> Comparison:
    """At the last layer, what is left of mu must grow as the divisor shrinks."""
    ends = [networks.last(table, "relative_mu", divisor=label) for label in DIVISORS]
    falling = all(later <= earlier + 0.02 for earlier, later in pairwise(ends))
    depth = int(table["layer"].max())  # type: ignore[arg-type]
    text = ", ".join(f"{label}: {power(end)}" for label, end in zip(DIVISORS, ends, strict=True))
    why = ""
    if not falling:
        why = (
            "the order turns among the smallest divisors, where attention is nearly one-hot: its largest "
            f"weight is {largest:.2f} on average at 1/8"
        )
    elif max(ends) - min(ends) < 0.15:
        why = "it matters in the first layers; from then on all fall together, ending within a factor 1.4"
    return Comparison(
        f"{name}, {mask} mask: a smaller divisor slows the collapse",
        "the smaller, the slower",
        f"relative mu at layer {depth} by divisor: {text}",
        falling,
        why,
    )


def figure_of(table: pl.DataFrame, name: str) -> Figure:
    """A column for each mask, a line for each divisor."""
    figure, first = collapse_figure(table, ("mask", MASKS), ("divisor", DIVISORS), 3.3, linewidth=1.6, zorder=2)
    key(figure, first, f"{name}, scores divided by")
    return figure


FIG3 = Study("wu2024", "fig3", "pure attention by score divisor (Figures 3 and 7)", _run, seconds=44.0)

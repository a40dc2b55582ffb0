"""Figures 3 and 7: the temperature. Scores are divided by sqrt(d_QK); a smaller divisor slows the collapse.

Pure attention, `softmax(X W_Q (X W_K)^T / sqrt(d_QK))`, nothing else changed. A small divisor makes attention sharp: a
token listens to few others, itself among them where it scores highest, and averages less. The paper's values of d_QK
are not in its text; these span both readings (1/64, 1 and 64 as d_QK or as the divisor itself).
"""

from functools import partial
from itertools import pairwise, product

import polars as pl
from torch import Tensor

from rankscope.figures import Figure
from rankscope.nets import Transformer
from rankscope_studies.study import Comparison, Setup, Study, StudyResult, StudyTexts
from rankscope_studies.wu2024 import networks
from rankscope_studies.wu2024.fig2 import collapse_figure
from rankscope_studies.wu2024.networks import MASKS, PAPER, StudyInputs, powers
from rankscope_studies.wu2024.panels import legend_below

DIVISORS = {"1/64": 1 / 64, "1/8": 1 / 8, "1": 1.0, "8": 8.0, "64": 64.0}  # sqrt(d_QK): BERT's is 8
TEXTS = StudyTexts("wu2024", "fig3")


def _run(setup: Setup, inputs: StudyInputs = PAPER) -> StudyResult:
    samples = 50 if setup.full else 2
    models = inputs.trained(setup)
    tables, sharp, figures, comparisons = [], [], {}, []
    for name, net in {**inputs.bert(setup), **models}.items():
        table = networks.of_network(name, curves(setup, name, net, inputs.tokens(net, samples), samples))
        few = inputs.tokens(net, min(samples, 2))
        file = networks.file_name(name, "sharpness")
        weights = setup.cached(file, partial(sharpness, net, few), excerpts=samples)
        tables.append(table)
        sharp.append(networks.of_network(name, weights))
        figures[networks.file_name(name).lower()] = figure_of(table, name)
        largest = float(weights.filter(divisor="1/8")["largest_weight"][0])
        comparisons += [_slower(table.filter(mask=mask), name, mask, largest) for mask in MASKS]
    notes = TEXTS.notes(samples=samples, **networks.note_values(models))
    return StudyResult(figures, {"divisor": pl.concat(tables), "sharpness": pl.concat(sharp)}, comparisons, notes)


def curves(setup: Setup, name: str, net: Transformer, X: Tensor, samples: int) -> pl.DataFrame:
    """Pure attention under every mask with every divisor."""
    tables = []
    for mask, (label, divisor) in product(MASKS, DIVISORS.items()):
        file = networks.file_name(name, mask, f"{divisor:g}")
        compute = partial(networks.collapse, net.variant(divisor=divisor), X, "SAN", mask)
        table = setup.cached(file, compute, excerpts=samples)
        tables.append(table.with_columns(pl.lit(label).alias("divisor")))
    return pl.concat(tables)


def sharpness(net: Transformer, X: Tensor) -> pl.DataFrame:
    """The largest weight of a row of attention, the mean over rows, heads and layers, complete mask."""
    rows = []
    for label, divisor in DIVISORS.items():
        pure = net.variant("san").variant(mask="complete", divisor=divisor)
        weights = [float(step.attention.amax(-1).mean()) for step in pure.steps(X) if step.attention is not None]
        rows.append({"divisor": label, "largest_weight": sum(weights) / len(weights)})
    return pl.DataFrame(rows)


def _slower(table: pl.DataFrame, name: str, mask: str, largest: float) -> Comparison:
    """At the last layer, what is left of mu must grow as the divisor shrinks."""
    by_divisor = {f"{label}:": networks.last(table, "relative_mu", divisor=label) for label in DIVISORS}
    ends = list(by_divisor.values())
    falling = all(later <= earlier + 0.02 for earlier, later in pairwise(ends))
    depth = int(table["layer"].max())  # type: ignore[arg-type]
    together = TEXTS.sentence("slower", "together") if max(ends) - min(ends) < 0.15 else ""
    why = together if falling else TEXTS.sentence("slower", "turns", largest=largest)
    return TEXTS.compare("slower", falling, name=name, mask=mask, depth=depth, ends=powers(by_divisor), why=why)


def figure_of(table: pl.DataFrame, name: str) -> Figure:
    """A column for each mask, a line for each divisor."""
    figure, first = collapse_figure(table, ("mask", MASKS), ("divisor", DIVISORS), 3.3, linewidth=1.6, zorder=2)
    legend_below(figure, first, f"{name}, scores divided by")
    return figure


STUDY = Study("wu2024", "fig3", "pure attention by score divisor (Figures 3 and 7)", _run, seconds=44.0)

"""The tables of the page, as text: what to choose by first, then each part with what was refused and why."""

import math
import statistics

import polars as pl

from rankscope.figures.text import power
from rankscope.remedies import REMEDIES
from rankscope.studies.remedies import on_trained_model
from rankscope.studies.remedies import training_results as results
from rankscope.studies.remedies.at_initialisation import BARE, NONE, PLACES, WHOLE
from rankscope.studies.remedies.depth_reached import THRESHOLD, DepthReached, spread
from rankscope.studies.remedies.measurements import PLACED, RemedyMeasurements
from rankscope.studies.remedies.theory_notes import note_of, taken_out
from rankscope.studies.study import PageTable

NOTHING = "–"
BEFORE, AFTER = "To choose by, before training", "To choose by, trained from scratch"
"""Titles of the tables to choose by."""


def page_tables(tables: RemedyMeasurements) -> list[PageTable]:
    """All tables of the page, in the order of reading."""
    after = chosen_after(tables)
    pages = [
        *([] if after is None else [after]),
        chosen_before(tables),
        initial(tables, WHOLE),
        initial(tables, BARE),
        put_cold(tables),
        *trainings(tables),
        laws(tables),
    ]
    return [*pages, theory(tables), refusals(tables)]


def chosen_before(tables: RemedyMeasurements) -> PageTable:
    """A row a remedy, the numbers to choose by that are known before training."""
    rows: list[list[str]] = []
    for remedy in tables.remedies:
        reached = [tables.at_start(remedy, setting) for setting in PLACED]
        cells = [spread(depths) if depths else NOTHING for depths in reached]
        moved = _number(on_trained_model.mean(tables.cold, remedy, "moved"), ".2f")
        rows.append([remedy, *cells, _order(tables, remedy), moved])
    note = (
        f"post, pre, no skips: depth reached, the layers until the relative residual falls below "
        f"{THRESHOLD:g}, of networks of {tables.deepest} layers at initialisation, median and range over "
        "seeds; “all” where it never does. no skips: of pre-norm networks, or post-norm where a remedy goes "
        "there alone. log times: by how much the log of a small residual is "
        "multiplied in each layer without skips, as measured; 3 is the doubly exponential law, 1 an "
        "exponential fall. moved, cold: how far the last "
        f"layer's tokens of the trained model move, as a share of their length. {NOTHING} where a remedy "
        "does not go there, or leaves no token that is not zero; the reasons are below."
    )
    return PageTable(BEFORE, ["remedy", *PLACED, "log times", "moved, cold"], rows, note)


def chosen_after(tables: RemedyMeasurements) -> PageTable | None:
    """A row a remedy, the numbers to choose by of trained networks; None where there are none."""
    settings = [kind for kind in results.SETTINGS if results.depths(tables.trained, kind)]
    if not settings:
        return None
    rows: list[list[str]] = []
    for remedy in dict.fromkeys([*tables.remedies, *tables.trained["remedy"]]):
        cells = [_learns(results.learns(tables.trained, remedy, setting)) for setting in settings]
        if len(tables.costs):
            price = results.price(tables.costs, remedy)
            cells.append(NOTHING if price is None else f"{price.median:.2f}")
        added = tables.trained.filter(remedy=remedy, quantity="parameters_added")["value"].drop_nulls()
        rows.append([remedy, *cells, NOTHING if added.is_empty() else f"{max(added):,.0f}"])
    headings = ["remedy", *settings, *(["time"] if len(tables.costs) else []), "added"]
    note = (
        "The deepest networks that learn: with every seed their held-out loss is "
        f"{results.MARGIN:g} below that of a guess by frequency, of characters or digits; “all” where no "
        "deeper ones were trained, “none” where not even the shallowest learn. time: of a step, none = 1. "
        f"added: parameters, at the deepest. {NOTHING} not trained: the reasons are below."
    )
    return PageTable(AFTER, headings, rows, note)


def initial(tables: RemedyMeasurements, variant: str) -> PageTable:
    """Residuals after the last layer, depth by depth."""
    columns = [(norm_place, depth) for norm_place in PLACES for depth in sorted(tables.initial["depth"].unique())]
    rows, marks = [], 0
    for remedy in tables.remedies:
        cells = [remedy]
        for norm_place, depth in columns:
            ends = [curve[-1] for curve in tables.known.get((remedy, norm_place, variant, depth), [])]
            at = tables.initial.filter(remedy=remedy, norm_place=norm_place, variant=variant, depth=depth, layer=depth)
            noisy = bool(ends) and bool(at["marked"].any())
            marks += noisy
            cells.append(_ends(ends) + ("°" if noisy else "") if ends else NOTHING)
        rows.append(cells)
    headings = ["remedy", *(f"{norm_place}-norm, {depth} layers" for norm_place, depth in columns)]
    note = (
        "Relative residual after the last layer: geometric mean over samples, median over seeds, in "
        "deviation arithmetic, on the same random weights."
    )
    if marks:
        note += " ° two passes that round otherwise differ on it: not all digits are sure."
    return PageTable(f"At initialisation, {variant}", headings, rows, note)


def put_cold(tables: RemedyMeasurements) -> PageTable:
    """Before and after, and why not."""
    rows, reasons = [], []
    for remedy in tables.remedies:
        means = {name: on_trained_model.mean(tables.cold, remedy, name) for name in on_trained_model.QUANTITIES}
        residual = means["log10"]
        numbers = [_number(means[name], ".3f") for name in ("entropy", "moved", "cosine")]
        rows.append([remedy, NOTHING if residual is None else power(residual), *numbers])
        reasons += [f" {NOTHING} {why}." for why in tables.cold.filter(remedy=remedy)["refused"].drop_nulls()]
    note = (
        "After the last layer: relative residual, entropy of attention in nats (mean over heads; none where "
        "a remedy makes weights negative), how far tokens moved from where they are without it, as a share "
        "of their length, and their cosine with those. Weights were not trained with the remedy: what is far "
        "from 0 has to be trained in."
    )
    headings = ["remedy", "residual", "entropy", "moved", "cosine"]
    return PageTable("Put cold on the trained model", headings, rows, note + "".join(reasons))


def trainings(tables: RemedyMeasurements) -> list[PageTable]:
    """A table a setting, where some were trained there; then those with a smaller learning rate."""
    both = [(tables.trained, ""), (tables.slower, f", learning rate {tables.slower_rate:g}")]
    return [
        trained_in(table, setting, f"Trained from scratch, {setting}{how}")
        for table, how in both
        for setting in results.SETTINGS
        if results.depths(table, setting)
    ]


def trained_in(table: pl.DataFrame, setting: str, title: str) -> PageTable:
    """A row a remedy: loss by depth, and what else was measured of the deepest."""
    depths = results.depths(table, setting)
    rows, reasons = [], list[str]()
    for remedy in table["remedy"].unique(maintain_order=True):
        cells = [remedy]
        for depth in depths:
            of = results.spread(results.values(table, remedy, setting, depth, "loss"))
            lost = results.diverged(table, remedy, setting, depth)
            cells.append((NOTHING if of is None else of.said()) + (f", {lost} diverged" if lost else ""))
        for quantity, form in (("relative_residual", ""), ("entropy", ".2f"), ("gradient_first_end", "")):
            of = results.spread(results.values(table, remedy, setting, depths[-1], quantity))
            cells.append(NOTHING if of is None else of.said(form) if form else power(of.median))
        lengths = [
            length
            for seed in table["seed"].drop_nulls().unique()
            if (length := results.path_length(table, remedy, setting, depths[-1], seed)) is not None
        ]
        cells.append(f"{statistics.median(lengths):.2f}" if lengths else NOTHING)
        why = results.refusal(table, remedy, setting)
        reasons += [] if why is None else [f" {NOTHING} {remedy}: {why}."]
        rows.append(cells)
    headings = ["remedy", *(f"loss, {depth}" for depth in depths)]
    headings += ["residual", "entropy", "gradient, layer 1", "path length"]
    note = (
        f"Median and range over seeds, by depth; the other numbers are of {depths[-1]} layers. Path "
        "length: heads on a path, weighed by its share of the output. One recipe for all, tuned for none."
    )
    return PageTable(title, headings, rows, note + "".join(reasons))


def laws(tables: RemedyMeasurements) -> PageTable:
    """The table of laws, predicted numbers beside measured ones."""
    names = {
        "order": "no skips: m of r' = k r^m",
        "identity": "whole: log10 of the residual, last layer less input",
        "fall": "whole, post-norm: decades a layer",
        "variance": "whole, pre-norm: mean square of the tokens after the last layer",
    }
    rows = []
    for row in tables.laws.iter_rows(named=True):
        seen = row["measured"]
        measured = row["said"] or (
            NOTHING if seen is None else results.SeedSpread(seen, row["low"], row["high"], 0).said(".3g")
        )
        predicted = NOTHING if row["predicted"] is None else f"{row['predicted']:.3g}"
        rows.append([row["remedy"], names[row["law"]], predicted, measured])
    note = (
        "At the published numbers, by the deepest networks; median and range over seeds. m = 3: the log "
        "triples in every layer; 2: it doubles; 1: an exponential fall, or none. The fall and the variance "
        "leave out that a remedy changes what branches say, and are right to a factor."
    )
    headings = ["remedy", "law", "predicted", "measured"]
    return PageTable("Laws, predicted and measured", headings, rows, note, wordy=True)


def theory(tables: RemedyMeasurements) -> PageTable:
    """Sentences, and the theorems that a remedy takes out."""
    rows = []
    held = set(tables.theorems.filter(pl.col("held"), remedy=NONE)["theorem"])
    for remedy in tables.remedies:
        known_theory, kind = note_of(remedy), REMEDIES.get(remedy.partition(":")[0])
        lost, reason = taken_out(tables.theorems, remedy)
        every = len(lost) == len(held)
        gone = f"{f'all {len(held)}' if every else ', '.join(lost)}: {reason}" if lost else "none"
        rows.append([
            remedy, "the network as it is" if kind is None else kind.formula,
            NOTHING if known_theory is None else f"{known_theory.sentence} ({known_theory.source})", gone,
        ])  # fmt: skip
    headings = ["remedy", "what it does", "what theory says", "theorems that it takes out"]
    note = (
        f"Theorems that hold on small random networks without the remedy, {len(held)} of them "
        f"({', '.join(sorted(held))}), and refuse them with it, with their own reason."
    )
    return PageTable("Theory", headings, rows, note, wordy=True)


def refusals(tables: RemedyMeasurements) -> PageTable:
    """Where a remedy does not go."""
    rows = []
    for remedy in tables.remedies:
        rows += [
            [remedy, f"random, {norm_place}-norm", why]
            for norm_place in PLACES
            if (why := tables.refused(remedy, norm_place)) is not None
        ]
        notes = tables.initial.filter(remedy=remedy)["note"].drop_nulls()
        rows += [[remedy, "random, no skips", notes[0]]] if len(notes) else []
        arithmetic = tables.initial.filter(pl.col("arithmetic") != "deviation", remedy=remedy)["arithmetic"]
        rows += (
            [[remedy, "random", f"deviation arithmetic has no rule for it: run in {arithmetic[0]}"]]
            if len(arithmetic)
            else []
        )
        why = next(iter(tables.cold.filter(remedy=remedy)["refused"].drop_nulls()), None)
        rows += [[remedy, "the trained model", why]] if why else []
    return PageTable("Where a remedy does not go", ["remedy", "network", "why"], rows, wordy=True)


def _learns(found: DepthReached | None) -> str:
    if found is None:
        return NOTHING
    return str(found) if found.layers else "none"


def _order(tables: RemedyMeasurements, remedy: str) -> str:
    order = tables.laws.filter(remedy=remedy, law="order")["measured"].drop_nulls()
    return NOTHING if order.is_empty() else f"{order[0]:.2f}"


def _ends(ends: list[float]) -> str:
    middle = statistics.median(ends)
    if middle < -1e4 and math.isfinite(middle):
        exponent = math.floor(math.log10(-middle))
        return f"10^(-{-middle / 10**exponent:.1f}e{exponent})"
    return power(middle)


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else f"{value:{form}}"

"""The tables of the page, as text: what to choose by first, then each part with what was refused and why."""

import math
import statistics

import polars as pl

from rankscope.figures import power
from rankscope.remedies import REMEDIES
from rankscope_studies.remedies import on_trained_model
from rankscope_studies.remedies import training_results as results
from rankscope_studies.remedies.at_initialisation import BARE, PLACES, THRESHOLD, WHOLE, depths_text
from rankscope_studies.remedies.measurements import PLACED, RemedyMeasurements
from rankscope_studies.remedies.theory_notes import note_of, taken_out
from rankscope_studies.study import PageTable, StudyTexts
from rankscope_studies.trial import NONE

NOTHING = "–"
BEFORE, AFTER = "To choose by, before training", "To choose by, trained from scratch"  # Titles of tables
TEXTS = StudyTexts("remedies", "tables")


def page_tables(tables: RemedyMeasurements) -> list[PageTable]:
    """All tables of the page, in the order of reading."""
    slower = f", learning rate {tables.slower_rate:g}"
    return [
        *([chosen_after(tables)] if results.settings(tables.trained) else []),
        chosen_before(tables),
        initial(tables, WHOLE),
        initial(tables, BARE),
        put_cold(tables),
        *(trained_in(tables.trained, setting) for setting in results.settings(tables.trained)),
        *(trained_in(tables.slower, setting, slower) for setting in results.settings(tables.slower)),
        laws(tables),
        theory_table(tables),
        refusals(tables),
    ]


def chosen_before(tables: RemedyMeasurements) -> PageTable:
    """A row a remedy, the numbers to choose by that are known before training."""
    rows: list[list[str]] = []
    for remedy in tables.remedies:
        reached = [tables.at_start(remedy, setting) for setting in PLACED]
        order = tables.laws.filter(remedy=remedy, law="order")["measured"].drop_nulls()
        moved = on_trained_model.mean(tables.cold, remedy, "moved")
        cells = [depths_text(depths) if depths else NOTHING for depths in reached]
        rows.append([remedy, *cells, _text(next(iter(order), None), ".2f"), _text(moved, ".2f")])
    note = TEXTS.sentence("before", threshold=THRESHOLD, deepest=tables.deepest)
    return PageTable(BEFORE, ["remedy", *PLACED, "log times", "moved, cold"], rows, note)


def chosen_after(tables: RemedyMeasurements) -> PageTable:
    """A row a remedy, the numbers to choose by of trained networks."""
    settings, timed = results.settings(tables.trained), len(tables.costs) > 0
    rows: list[list[str]] = []
    for remedy in dict.fromkeys([*tables.remedies, *tables.trained["remedy"]]):
        reached = [results.learns(tables.trained, remedy, setting) for setting in settings]
        cells = [NOTHING if depth is None else str(depth) if depth.layers else "none" for depth in reached]
        if timed:
            price = results.price(tables.costs, remedy)
            cells.append(_text(price and price.median, ".2f"))
        added = results.parameters_added(tables.trained, remedy)
        rows.append([remedy, *cells, _text(added, ",.0f")])
    headings = ["remedy", *settings, *(["time"] if timed else []), "added"]
    return PageTable(AFTER, headings, rows, TEXTS.sentence("after", margin=results.MARGIN))


def initial(tables: RemedyMeasurements, variant: str) -> PageTable:
    """Residuals after the last layer, depth by depth."""
    columns = [(norm_place, depth) for norm_place in PLACES for depth in sorted(tables.initial["depth"].unique())]
    rows, note = [], TEXTS.sentence("initial")
    for remedy in tables.remedies:
        cells = [remedy]
        for norm_place, depth in columns:
            ends = [curve[-1] for curve in tables.known.get((remedy, norm_place, variant, depth), [])]
            key = {"remedy": remedy, "norm_place": norm_place, "variant": variant, "depth": depth, "layer": depth}
            mark = "°" if ends and bool(tables.initial.filter(**key)["marked"].any()) else ""
            cells.append(_ends(ends) + mark if ends else NOTHING)
        rows.append(cells)
    if any("°" in cell for cells in rows for cell in cells):
        note += TEXTS.sentence("marked")
    headings = ["remedy", *(f"{norm_place}-norm, {depth} layers" for norm_place, depth in columns)]
    return PageTable(f"At initialisation, {variant}", headings, rows, note)


def put_cold(tables: RemedyMeasurements) -> PageTable:
    """Before and after, and why not."""
    rows, note = [], TEXTS.sentence("cold")
    for remedy in tables.remedies:
        residual, *means = (on_trained_model.mean(tables.cold, remedy, name) for name in on_trained_model.QUANTITIES)
        rows.append([remedy, NOTHING if residual is None else power(residual), *(_text(mean, ".3f") for mean in means)])
        note += "".join(f" {NOTHING} {why}." for why in tables.cold.filter(remedy=remedy)["refused"].drop_nulls())
    headings = ["remedy", "residual", *on_trained_model.QUANTITIES[1:]]
    return PageTable("Put cold on a model", headings, rows, note)


def trained_in(table: pl.DataFrame, setting: str, how: str = "") -> PageTable:
    """A row a remedy: loss by depth, and what else was measured of the deepest."""
    depths = results.depths(table, setting)
    rows, note = [], TEXTS.sentence("trained", deepest=depths[-1])
    for remedy in table["remedy"].unique(maintain_order=True):
        cells = [remedy]
        for depth in depths:
            loss = results.spread(table, remedy, setting, depth, "loss")
            lost = results.diverged(table, remedy, setting, depth)
            cells.append((NOTHING if loss is None else loss.said()) + (f", {lost} diverged" if lost else ""))
        for quantity, form in (("relative_residual", ""), ("entropy", ".2f"), ("gradient_first_end", "")):
            of = results.spread(table, remedy, setting, depths[-1], quantity)
            cells.append(NOTHING if of is None else of.said(form) if form else power(of.median))
        seeds = table["seed"].drop_nulls().unique()
        lengths = (results.path_length(table, remedy, setting, depths[-1], seed) for seed in seeds)
        length = results.spread_of(length for length in lengths if length is not None)
        rows.append([*cells, _text(length and length.median, ".2f")])
        why = results.refusal(table, remedy, setting)
        note += "" if why is None else f" {NOTHING} {remedy}: {why}."
    headings = ["remedy", *(f"loss, {depth}" for depth in depths)]
    headings += ["residual", "entropy", "gradient, layer 1", "path length"]
    return PageTable(f"Trained from scratch, {setting}{how}", headings, rows, note)


def laws(tables: RemedyMeasurements) -> PageTable:
    """The table of laws, predicted numbers beside measured ones."""
    rows = []
    for remedy, law, predicted, middle, low, high, sentence in tables.laws.iter_rows():
        measured = NOTHING if middle is None else results.SeedSpread(middle, low, high, 0).said(".3g")
        rows.append([remedy, TEXTS.sentence("law", law), _text(predicted, ".3g"), sentence or measured])
    headings = ["remedy", "law", "predicted", "measured"]
    return PageTable("Laws, predicted and measured", headings, rows, TEXTS.sentence("laws"), wordy=True)


def theory_table(tables: RemedyMeasurements) -> PageTable:
    """Sentences, and the theorems that a remedy takes out."""
    rows = []
    held = set(tables.theorems.filter(pl.col("held"), remedy=NONE)["theorem"])
    for remedy in tables.remedies:
        theory, kind = note_of(remedy), REMEDIES.shipped.get(remedy.partition(":")[0])
        lost, reason = taken_out(tables.theorems, remedy)
        names = f"all {len(held)}" if len(lost) == len(held) else ", ".join(lost)
        known = NOTHING if theory is None else f"{theory.sentence} ({theory.source})"
        does = "the network as it is" if kind is None else kind.formula
        rows.append([remedy, does, known, f"{names}: {reason}" if lost else "none"])
    headings = ["remedy", "what it does", "what theory says", "theorems that it takes out"]
    note = TEXTS.sentence("theory", count=len(held), held=", ".join(sorted(held)))
    return PageTable("Theory", headings, rows, note, wordy=True)


def refusals(tables: RemedyMeasurements) -> PageTable:
    """Where a remedy does not go."""
    rows = []
    for remedy in tables.remedies:
        mine = tables.initial.filter(remedy=remedy)
        reasons = {f"random, {norm_place}-norm": tables.refused(remedy, norm_place) for norm_place in PLACES}
        reasons["random, no skips"] = next(iter(mine["note"].drop_nulls()), None)
        arithmetic = next(iter(mine.filter(pl.col("arithmetic") != "deviation")["arithmetic"]), None)
        reasons["random"] = arithmetic and f"deviation arithmetic has no rule for it: run in {arithmetic}"
        reasons["the model"] = tables.refused_cold(remedy)
        rows += [[remedy, network, why] for network, why in reasons.items() if why]
    return PageTable("Where a remedy does not go", ["remedy", "network", "why"], rows, wordy=True)


def _ends(ends: list[float]) -> str:
    middle = statistics.median(ends)
    if middle < -1e4 and math.isfinite(middle):
        exponent = math.floor(math.log10(-middle))
        return f"10^(-{-middle / 10**exponent:.1f}e{exponent})"
    return power(middle)


def _text(value: float | None, form: str) -> str:
    return NOTHING if value is None else f"{value:{form}}"

"""One row a remedy: everything that is known of it, joined."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import polars as pl

from rankscope.remedies import REMEDIES
from rankscope_studies.remedies import at_initialisation, on_trained_model
from rankscope_studies.remedies import training_results as results
from rankscope_studies.remedies.at_initialisation import BARE, PLACES, WHOLE, Curves, DepthReached
from rankscope_studies.remedies.theory_notes import laws, note_of, taken_out
from rankscope_studies.remedies.trainings import SLOWER

# The settings of training, as networks at initialisation have them: where norms stand, and which variant.
PLACED = {"post": ("post", WHOLE), "pre": ("pre", WHOLE), "no skips": ("pre", BARE)}


@dataclass(frozen=True)
class RemedyMeasurements:
    """What was measured; trainings and their costs may be absent, or hold a part."""

    initial: pl.DataFrame
    theorems: pl.DataFrame
    cold: pl.DataFrame
    variances: pl.DataFrame | None = None
    trained: pl.DataFrame = field(default_factory=lambda: results.completed(None))
    costs: pl.DataFrame = field(default_factory=lambda: results.priced(None))
    slower: pl.DataFrame = field(default_factory=lambda: results.completed(None))
    slower_rate: float = SLOWER.sizes.lr  # The smaller learning rate of the trainings in `slower`

    @property
    def remedies(self) -> list[str]:
        """All remedies in order, none first."""
        return self.initial["remedy"].unique(maintain_order=True).to_list()

    @property
    def deepest(self) -> int:
        """Layers of the deepest networks at initialisation."""
        return int(self.initial["depth"].max())  # type: ignore[arg-type]

    @cached_property
    def known(self) -> Curves:
        """All curves of networks at initialisation."""
        return at_initialisation.curves(self.initial)

    @cached_property
    def laws(self) -> pl.DataFrame:
        """Laws, with predicted numbers beside measured ones."""
        return laws(self.initial, self.variances)

    def at_start(self, remedy: str, setting: str) -> list[DepthReached]:
        """Depth reached at initialisation by the deepest networks, by seed; none where it does not go."""
        return [at_initialisation.depth_reached(curve) for curve in self.curves(remedy, setting)]

    def curves(self, remedy: str, setting: str) -> list[list[float]]:
        """log10 of the residual by layer, of every seed. Without skips: of pre-norm networks, or of post-norm
        ones where a remedy goes onto these alone."""
        norm_place, variant = PLACED[setting]
        if setting == "no skips" and self.refused(remedy, norm_place) is not None:
            norm_place = "post"
        return self.known.get((remedy, norm_place, variant, self.deepest), [])

    def refused(self, remedy: str, norm_place: str) -> str | None:
        """Why it does not go onto a random network."""
        return next(iter(self.initial.filter(remedy=remedy, norm_place=norm_place)["refused"].drop_nulls()), None)

    def refused_cold(self, remedy: str) -> str | None:
        """Why it does not go onto the trained model."""
        return next(iter(self.cold.filter(remedy=remedy)["refused"].drop_nulls()), None)


def rows(tables: RemedyMeasurements) -> pl.DataFrame:
    """One a remedy, numbers and sentences, for files and for whoever goes on with it."""
    every, known = [], tables.laws
    for remedy in tables.remedies:
        kind, note = REMEDIES.shipped.get(remedy.partition(":")[0]), note_of(remedy)
        lost, reason = taken_out(tables.theorems, remedy)
        row: dict[str, Any] = {
            "remedy": remedy,
            "says": "the network as it is" if kind is None else kind.formula,
            "source": "" if kind is None else kind.citation,
            "theory": "" if note is None else note.sentence,
            "theory_source": "" if note is None else note.source,
            "theorems_lost": len(lost),
            "theorems_lost_because": reason,
        }
        for setting in PLACED:
            reached = tables.at_start(remedy, setting)
            middle = at_initialisation.over_seeds(reached) if reached else None
            row[f"start_{setting}_reached"] = None if middle is None else float(middle.layers)
            row[f"start_{setting}_never_fell"] = None if middle is None else middle.at_limit
            row[f"start_{setting}_said"] = at_initialisation.depths_text(reached) if reached else None
        row |= {f"refused_{norm_place}": tables.refused(remedy, norm_place) for norm_place in PLACES}
        order = known.filter(remedy=remedy, law="order").row(0, named=True) if note and ":" not in remedy else {}
        row |= {f"order_{name}": order.get(name) for name in ("predicted", "measured")}
        for name in on_trained_model.QUANTITIES:
            row[f"cold_{name}"] = on_trained_model.mean(tables.cold, remedy, name)
        row["cold_refused"] = tables.refused_cold(remedy)
        for setting in results.SETTINGS:
            row |= _trained(tables.trained, remedy, setting)
        price = results.price(tables.costs, remedy)
        row["parameters_added"] = results.parameters_added(tables.trained, remedy)
        row["time_ratio"] = price and price.median
        every.append(row)
    return pl.DataFrame(every, infer_schema_length=None).rename(lambda name: name.replace(" ", "_"))


def _trained(table: pl.DataFrame, remedy: str, setting: str) -> dict[str, Any]:
    """Numbers of the deepest networks of a setting."""
    depth = max(results.depths(table, setting), default=0)
    quantities = ("loss", "accuracy", "relative_residual", "entropy")
    spreads = {name: results.spread(table, remedy, setting, depth, name) for name in quantities}
    loss, learns = spreads["loss"], results.learns(table, remedy, setting)
    return {
        **{f"trained_{setting}_{name}": spread and spread.median for name, spread in spreads.items()},
        f"trained_{setting}_loss_low": loss and loss.low,
        f"trained_{setting}_loss_high": loss and loss.high,
        f"trained_{setting}_depth": depth or None,
        f"learns_{setting}": learns and float(learns.layers),
        f"learns_{setting}_all": learns and learns.at_limit,
    }

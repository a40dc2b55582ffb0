"""One row a remedy: everything that is known of it, joined."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import polars as pl

from rankscope.remedies import REMEDIES
from rankscope.studies.remedies import on_trained_model
from rankscope.studies.remedies import training_results as results
from rankscope.studies.remedies.at_initialisation import BARE, PLACES, WHOLE, Curves, curves
from rankscope.studies.remedies.depth_reached import DepthReached, depth_reached, over_seeds, spread
from rankscope.studies.remedies.theory_notes import laws, note_of, taken_out
from rankscope.studies.remedies.trainings import SLOWER

PLACED = {"post": ("post", WHOLE), "pre": ("pre", WHOLE), "no skips": ("pre", BARE)}
"""The settings of training, as networks at initialisation have them: where norms stand, and which variant."""


@dataclass(frozen=True)
class RemedyMeasurements:
    """What was measured; trainings and their costs may be absent, or hold a part."""

    initial: pl.DataFrame
    theorems: pl.DataFrame
    cold: pl.DataFrame
    variances: pl.DataFrame | None = None
    trained: pl.DataFrame = field(default_factory=lambda: results.whole(None))
    costs: pl.DataFrame = field(default_factory=lambda: results.priced(None))
    slower: pl.DataFrame = field(default_factory=lambda: results.whole(None))
    """Trainings with a smaller learning rate, which is:"""
    slower_rate: float = SLOWER.sizes.lr

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
        return curves(self.initial)

    @cached_property
    def laws(self) -> pl.DataFrame:
        """Laws, with predicted numbers beside measured ones."""
        return laws(self.initial, self.variances)

    def at_start(self, remedy: str, setting: str) -> list[DepthReached]:
        """Depth reached at initialisation by the deepest networks, by seed; none where it does not go."""
        return [depth_reached(curve) for curve in self.curves(remedy, setting)]

    def curves(self, remedy: str, setting: str) -> list[list[float]]:
        """log10 of the residual by layer, of every seed. Without skips: of pre-norm networks, or of post-norm
        ones where a remedy goes onto these alone."""
        norm_place, variant = PLACED[setting]
        if setting == "no skips" and self.refused(remedy, norm_place) is not None:
            norm_place = "post"
        return self.known.get((remedy, norm_place, variant, self.deepest), [])

    def refused(self, remedy: str, norm_place: str) -> str | None:
        """Why it does not go onto a random network."""
        reasons = self.initial.filter(remedy=remedy, norm_place=norm_place)["refused"].drop_nulls()
        return reasons[0] if len(reasons) else None


def rows(tables: RemedyMeasurements) -> pl.DataFrame:
    """One a remedy, numbers and sentences, for files and for whoever goes on with it."""
    every, known = [], tables.laws
    for remedy in tables.remedies:
        kind, note = REMEDIES.get(remedy.partition(":")[0]), note_of(remedy)
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
            row |= _reached(f"start_{setting}", reached)
        for norm_place in PLACES:
            row[f"refused_{norm_place}"] = tables.refused(remedy, norm_place)
        order = known.filter(remedy=remedy, law="order").row(0, named=True) if note and ":" not in remedy else {}
        row |= {"order_predicted": order.get("predicted"), "order_measured": order.get("measured")}
        row |= {
            f"cold_{name}": on_trained_model.mean(tables.cold, remedy, name) for name in on_trained_model.QUANTITIES
        }
        row["cold_refused"] = next(iter(tables.cold.filter(remedy=remedy)["refused"].drop_nulls()), None)
        row |= _trained(tables, remedy)
        every.append(row)
    return pl.DataFrame(every, infer_schema_length=None).rename(lambda name: name.replace(" ", "_"))


def _reached(name: str, found: list[DepthReached]) -> dict[str, Any]:
    middle = over_seeds(found) if found else None
    return {
        f"{name}_reached": None if middle is None else float(middle.layers),
        f"{name}_never_fell": None if middle is None else middle.whole,
        f"{name}_said": spread(found) if found else None,
    }


def _trained(tables: RemedyMeasurements, remedy: str) -> dict[str, Any]:
    """Of the deepest networks of each setting; price and parameters."""
    row: dict[str, Any] = {}
    for setting in results.SETTINGS:
        known = results.depths(tables.trained, setting)
        depth = known[-1] if known else 0
        for quantity in ("loss", "accuracy", "relative_residual", "entropy"):
            of = results.spread(results.values(tables.trained, remedy, setting, depth, quantity))
            row[f"trained_{setting}_{quantity}"] = None if of is None else of.median
        loss = results.spread(results.values(tables.trained, remedy, setting, depth, "loss"))
        row[f"trained_{setting}_loss_low"] = None if loss is None else loss.low
        row[f"trained_{setting}_loss_high"] = None if loss is None else loss.high
        row[f"trained_{setting}_depth"] = depth or None
        learns = results.learns(tables.trained, remedy, setting)
        row[f"learns_{setting}"] = None if learns is None else float(learns.layers)
        row[f"learns_{setting}_all"] = None if learns is None else learns.whole
    added = tables.trained.filter(remedy=remedy, quantity="parameters_added")["value"].drop_nulls()
    price = results.price(tables.costs, remedy)
    return row | {
        "parameters_added": None if added.is_empty() else float(added.max()),  # type: ignore[arg-type]
        "time_ratio": None if price is None else price.median,
    }

"""`Spikes`: the loss spikes of a training, and what came before each; made by `spikes.py`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import polars as pl

from rankscope.extras import counted
from rankscope.results import Result, Section, Table, sentence
from rankscope.runs import Manifest
from rankscope.trainings.training import title_of

SURE = 0.05  # The adjusted chance up to which a lead is spoken of
SHOWN, ROWS = 8, 12  # Spikes that have a table, the latest ones, and rows of each, at most
SPIKES: dict[str, Any] = {"first": pl.Int64, "last": pl.Int64, "peak": pl.Float64, "deviations": pl.Float64}
EVENTS: dict[str, Any] = {
    "spike": pl.Int64, "signal": pl.String, "layer": pl.Int64, "head": pl.Int64, "step": pl.Int64, "lead": pl.Int64,
    "direction": pl.Int64, "distance": pl.Float64, "chance": pl.Float64, "adjusted": pl.Float64,
}  # fmt: skip


class Spike(NamedTuple):
    """A loss spike: the steps where it begins and ends, its highest value, and by how many standard deviations that
    is above the mean before it."""

    first: int
    last: int
    peak: float
    deviations: float

    @property
    def description(self) -> str:
        """What the loss does there, in words."""
        return f"rises to {self.peak:.3g}" if math.isfinite(self.peak) else "is no number"


class Event(NamedTuple):
    """A signal that left its band before a spike, at one place or at several at once."""

    signal: str  # Its name
    place: str  # Layers and heads, in words; empty for a number of the whole run
    lead: int  # Steps before the spike
    rose: bool  # True if it rose, False if it fell
    chance: float  # The largest adjusted chance of these places


@dataclass(frozen=True, eq=False, repr=False)
class Spikes(Result):
    """The spikes of a run, and what came before each.

    Args:
        score: OLMo 2's spike score of the loss, in percent.
        spikes: Every spike, in order.
        events: Signals that had left their band when a spike began, the earliest of each spike first: spike (its
            number, from 0) · signal · layer · head · step (the first outside the band) · lead (in steps) · direction (1
            upwards, -1 downwards) · distance (from the median, in spreads, at the farthest) · chance · adjusted.
        signals: How many signals were looked at.
        manifest: That of the run, if it has one.
    """

    kind = "spikes"
    schemas: ClassVar = {"spikes": SPIKES, "spike_events": EVENTS}
    score: float
    spikes: list[Spike]
    events: pl.DataFrame
    signals: int
    manifest: Manifest = field(default_factory=Manifest)
    notes: tuple[str, ...] = ()

    @property
    def tables(self) -> Mapping[str, pl.DataFrame]:
        """The spikes, and the signals that moved before them."""
        spikes = pl.DataFrame([spike._asdict() for spike in self.spikes], schema=SPIKES)
        return {"spikes": spikes, "spike_events": self.events}

    def details(self) -> dict[str, Any]:
        """The score, and how many signals were looked at."""
        return {"score": self.score, "signals": self.signals}

    @classmethod
    def made_of(cls, tables: Mapping[str, pl.DataFrame], manifest: Manifest, details: Mapping[str, Any]) -> "Spikes":
        """The spikes of these tables."""
        spikes = [Spike(**row) for row in tables["spikes"].iter_rows(named=True)]
        return cls(float(details["score"]), spikes, tables["spike_events"], int(details["signals"]), manifest,
                   tuple(details.get("notes", ())))  # fmt: skip

    @property
    def title(self) -> str:
        """How many spikes there are, and the score."""
        return f"Spikes: {counted(len(self.spikes), 'spike')} of the loss, spike score {self.score:.2g}%"

    def overview(self) -> Section:
        """What happened, spike by spike."""
        return Section(self.title, "", notes=self.sentences)

    def sections(self) -> list[Section]:
        """A table for each of the latest spikes; none without a spike."""
        if not self.spikes:
            return []
        tables, notes = [], []
        for index, spike in list(enumerate(self.spikes))[-SHOWN:]:
            where, events = f"step {spike.first:,}, where the loss {spike.description}", self.order(index)
            if not events:
                notes.append(f"Before {where}, {self.none_left}.")
                continue
            rows = []
            for event in events[:ROWS]:
                way = "rose" if event.rose else "fell"
                rows.append([title_of(event.signal), event.place, way, f"{event.lead:,}", f"{event.chance:.2g}"])
            few = f" The first {ROWS} of {len(events)}." if len(events) > ROWS else ""
            note = f"{self.sure(index).height} of {self.signals} signals left their band before it.{few}"
            tables.append(
                Table(f"Before {where}", ["signal", "where", "moved", "steps before", "chance"], rows, note=note)
            )
        count, shown = len(self.spikes), min(SHOWN, len(self.spikes))
        few = f" Shown are the last {shown}." if shown < count else ""
        lead = sentence("spikes", "lead", count=counted(count, "spike"), sure=SURE, few=few)
        return [Section("Loss spikes, and what came before", lead, tables=tables, notes=notes, key="spikes")]

    @property
    def sentences(self) -> list[str]:
        """What happened, spike by spike."""
        if not self.spikes:
            return [f"The loss has no spike; its spike score is {self.score:.2g}%."]
        count = "1 spike" if len(self.spikes) == 1 else f"{len(self.spikes)} spikes"
        lines = [f"The loss has {count}; its spike score is {self.score:.2g}%."]
        for index, spike in enumerate(self.spikes):
            came = self.sure(index)
            before = f"before it {self.none_left}"
            if came.height:
                before = f"before it {'; then '.join(map(_words, came.head(3).iter_rows(named=True)))}"
                before += f"; {came.height} of {self.signals} signals did so" if came.height > 3 else ""
            lines.append(f"At step {spike.first} the loss {spike.description}; {before}.")
        return lines

    @property
    def none_left(self) -> str:
        """The sentence for a spike before which no signal left its band for sure."""
        return f"none of {self.signals} signals left its band for sure"

    def sure(self, number: int) -> pl.DataFrame:
        """The events before the spike of this number whose adjusted chance is at most `SURE`, the earliest first."""
        return self.events.filter(pl.col("spike") == number, pl.col("adjusted") <= SURE)

    def order(self, number: int) -> list[Event]:
        """What `sure` has, for a reader: layers and heads at which a signal moved at the same step are one event."""
        groups = self.sure(number).group_by("signal", "lead", "direction", maintain_order=True)
        return [
            Event(str(signal), places_of(rows), int(lead), int(direction) > 0, float(rows["adjusted"].to_numpy().max()))
            for (signal, lead, direction), rows in groups
        ]


def _words(row: dict[str, Any]) -> str:
    """One signal that left its band, in words."""
    of = "" if row["layer"] is None else f" of layer {row['layer']}"
    of += "" if row["head"] is None else f", head {row['head']},"
    way = "rose" if row["direction"] > 0 else "fell"
    return f"{row['signal']}{of} {way} {row['lead']} steps earlier (chance {row['adjusted']:.2g})"


def places_of(rows: pl.DataFrame) -> str:
    """The layers and heads of some events, in words.

    >>> places_of(pl.DataFrame({"layer": [2, 3, 4, 7], "head": [None] * 4}))
    'layers 2–4, 7'
    >>> places_of(pl.DataFrame({"layer": [2, 2, 3], "head": [0, 5, 1]}))
    '3 heads of layers 2–3'
    """
    layers, heads = sorted(rows["layer"].drop_nulls().unique().to_list()), rows["head"].drop_nulls().to_list()
    if not layers:
        return ""
    begins = [k for k, layer in enumerate(layers) if not k or layer != layers[k - 1] + 1]
    runs = [layers[begin:end] for begin, end in zip(begins, [*begins[1:], len(layers)], strict=True)]
    numbers = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
    words = f"layer{'s' * (len(layers) > 1)} {numbers}"
    return words if not heads else f"{words}, head {heads[0]}" if len(heads) == 1 else f"{len(heads)} heads of {words}"

"""Loss spikes of a training, and which signals left their usual range before each.

**Spikes.** A value of the loss is a spike if it lies at least 7 standard deviations above the mean of the values before
it that were none: the last 1,000, or a tenth of the run if that is less, since a falling loss has a wide spread over a
long window. Spikes with no more than `GAP` values between them are one. OLMo 2's spike score is the share of values
that lie so far from the mean of all 1,000 values before them, above or below.

**Order of events.** A signal (the gradients of a layer's queries and keys, its largest logit, ...) has a band before
every spike: the median of `REFERENCE` values that end `HORIZON` values before the spike, plus and minus `WIDTH` times
their spread (the median distance from the median, scaled to be the standard deviation of a normal variable). Signals
that are positive are compared by their logs. The signal has **left its band** where its values lie outside, on one
side, from some step until the spike, but for a share `RETURNS` of them; by so many steps it **leads**.

**Confidence.** A signal that often leaves its band says nothing when it does so before a spike. The same question is
therefore asked all over the quiet part of the run: with a lead as long or longer at k of n quiet steps, the
chance of such a lead without any spike is `(k + 1) / (n + 1)`. Many signals are looked at at once: `adjusted` is that
chance corrected for their number (Benjamini & Hochberg 1995: among signals with an adjusted chance below c, a share of
at most c is there by accident). Quiet steps close to each other are not independent, and a lead is no proof of a cause.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import polars as pl

from rankscope.errors import FileError, require
from rankscope.extras import counted
from rankscope.results import Result, Section, Table, sentence
from rankscope.runs import Manifest
from rankscope.trainings.training import title_of

DEVIATIONS, WINDOW = 7.0, 1000  # OLMo 2's: how far a spike is away, and over how many values the mean goes
SHORT = 50  # The least window
LEAST = 20  # Values that there must be before one can be a spike, or a band
SQUARED = 1e150  # A loss of this size or more is infinitely far away: its square is no number
CANCELLED = 1e-6  # The share of the largest sum of squares below which sums have lost too many digits
GAP = 10  # Values between two spikes that count as one
REFERENCE, HORIZON = 100, 50  # Values that a band is made of, and the longest lead in values
WIDTH = 5.0  # Half the width of a band, in spreads
RETURNS = 0.25  # The share of values that may lie inside the band after it was left
NORMAL = 1.4826  # The standard deviation of a normal variable over its median distance from the median
ROUGH = 1e-6  # The least spread of a signal, as a share of its median: one that was constant has none of its own
QUIET = 2000  # Quiet steps that are looked at, evenly spread, at most
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
            moved = self.sure(index)
            before = f"before it {self.none_left}"
            if moved.height:
                before = f"before it {'; then '.join(map(_words, moved.head(3).iter_rows(named=True)))}"
                before += f"; {moved.height} of {self.signals} signals did so" if moved.height > 3 else ""
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


class Signal(NamedTuple):
    """One number of a training over its steps."""

    name: str
    steps: np.ndarray
    values: np.ndarray
    layer: int | None = None
    head: int | None = None


def deviations_from_mean(values: Any, window: int = WINDOW, outlier: float = math.inf) -> np.ndarray:
    """By how many standard deviations each value is above the mean of those before it; 0 where they are too few.

    Args:
        values: Numbers in the order of their steps; one that is not finite is infinitely far above.
        window: How many values the mean goes over.
        outlier: Values that are at least so many standard deviations away do not count for later means.

    >>> float(deviations_from_mean([1.0, 1.2] * 20 + [3.1])[-1].round())
    20.0
    """
    numbers = np.asarray(values, dtype=float).tolist()
    deviations, kept = np.zeros(len(numbers)), deque[float]()
    origin = total = square = largest = 0.0  # sums of what is kept, less the origin, and the largest sum of squares
    for k, value in enumerate(numbers):
        if not abs(value) < SQUARED:
            deviations[k] = math.inf
            continue
        if len(kept) >= LEAST:
            spread = square - total * total / len(kept)
            if spread < CANCELLED * largest:  # too few digits are left of a difference: the sums are made again
                origin = kept[-1]
                away = np.fromiter(kept, float) - origin
                total, square = float(away.sum()), float((away * away).sum())
                largest, spread = square, square - total * total / len(kept)
            sd, far = math.sqrt(max(0.0, spread / len(kept))), value - origin - total / len(kept)
            deviations[k] = far / sd if sd > 0 else math.copysign(math.inf, far) if far else 0.0
        if abs(deviations[k]) < outlier:
            kept.append(value)
            total, square = total + (value - origin), square + (value - origin) ** 2
            if len(kept) > window:
                old = kept.popleft() - origin
                total, square = total - old, square - old**2
            largest = max(largest, square)
    return deviations


def spike_score(values: Any, window: int = WINDOW, deviations: float = DEVIATIONS) -> float:
    """OLMo 2's spike score: the percentage of values at least so many standard deviations from their rolling mean.

    Args:
        values: Numbers in the order of their steps.
        window: How many values before each one the mean goes over.
        deviations: From how many standard deviations on a value counts.
    """
    away = np.abs(deviations_from_mean(values, window)) >= deviations
    return 100.0 * float(away.mean()) if len(away) else 0.0


def find_spikes(loss: Signal, window: int | None = None, deviations: float = DEVIATIONS) -> list[Spike]:
    """The spikes of a loss, in order.

    Args:
        loss: The loss by step.
        window: How many values the mean goes over; if left out, 1,000 or a tenth of all, whichever is less.
        deviations: From how many standard deviations above the mean on a value is a spike.
    """
    window = min(WINDOW, max(SHORT, len(loss.values) // 10)) if window is None else window
    above = deviations_from_mean(loss.values, window, deviations)
    spikes: list[list[int]] = []
    for k in np.flatnonzero(above >= deviations).tolist():
        if spikes and k - spikes[-1][-1] <= GAP + 1:
            spikes[-1].append(k)
        else:
            spikes.append([k])
    return [
        Spike(
            int(loss.steps[places[0]]), int(loss.steps[places[-1]]),
            float(np.nan_to_num(loss.values[places], nan=np.inf, posinf=np.inf).max()), float(above[places].max()),
        )
        for places in spikes
    ]  # fmt: skip


def order_of_events(
    loss: Signal, signals: Sequence[Signal], *, window: int | None = None, deviations: float = DEVIATIONS
) -> Spikes:
    """Find the spikes of a loss, and which signals left their band before each, in the order in which they did.

    Args:
        loss: The loss by step.
        signals: Other numbers of the run; each has steps of its own.
        window: How many values of the loss its mean goes over; if left out, as in `find_spikes`.
        deviations: From how many standard deviations above the mean on a loss is a spike.

    >>> steps = np.arange(400)
    >>> noise = np.random.default_rng(0).normal(size=(2, 400))
    >>> loss = Signal("loss", steps, 2 + 0.1 * noise[0] + 5 * (steps == 300))
    >>> logit = Signal("largest_logit", steps, 10 + noise[1] + 20 * ((steps >= 280) & (steps < 310)))
    >>> order_of_events(loss, [logit]).events.select("spike", "signal", "step", "lead").rows()
    [(0, 'largest_logit', 280, 20)]
    """
    spikes = find_spikes(loss, window, deviations)
    rows: list[dict[str, Any]] = []
    for chosen in _by_steps(signals):
        steps, values = chosen[0].steps, _comparable(chosen)
        places = np.searchsorted(steps, [spike.first for spike in spikes]).tolist()  # values there do not come before
        before = {index: _leads(values, at) for index, at in enumerate(places) if at > LEAST}
        # The quiet steps are asked about signals that left their band before some spike alone: that takes the time.
        moved = np.flatnonzero(sum((lead for lead, *_ in before.values()), np.zeros(len(chosen), dtype=int)))
        quiet = _quiet(steps, spikes) if len(moved) else []
        at_rest = np.array([_leads(values[moved], k)[0] for k in quiet]).reshape(len(quiet), len(moved))
        for index, (lead, direction, distance) in before.items():
            for column, k in enumerate(moved.tolist()):
                if lead[k]:
                    first, step = spikes[index].first, int(steps[places[index] - lead[k]])
                    chance = (float((at_rest[:, column] >= lead[k]).sum()) + 1) / (len(quiet) + 1)
                    rows.append({
                        "spike": index, "signal": chosen[k].name, "layer": chosen[k].layer, "head": chosen[k].head,
                        "step": step, "lead": first - step, "direction": int(direction[k]),
                        "distance": float(distance[k]), "chance": chance,
                    })  # fmt: skip
    table = pl.DataFrame(rows, schema={name: kind for name, kind in EVENTS.items() if name != "adjusted"})
    adjusted = np.ones(table.height)
    for index in range(len(spikes)):
        mine = (table["spike"] == index).to_numpy()
        adjusted[mine] = _adjusted(table["chance"].to_numpy()[mine], len(signals))
    table = table.with_columns(adjusted=pl.Series(adjusted, dtype=pl.Float64))
    table = table.sort("spike", "step", "adjusted", "signal", maintain_order=True)
    return Spikes(spike_score(loss.values, window or WINDOW, deviations), spikes, table, len(signals))


def _by_steps(signals: Iterable[Signal]) -> list[list[Signal]]:
    """Signals with the same steps together."""
    groups: dict[bytes, list[Signal]] = {}
    for signal in signals:
        sentence = f"{signal.name} must have a value at each of its steps"
        require(len(signal.steps) == len(signal.values), sentence, FileError, signal.name)
        groups.setdefault(np.asarray(signal.steps, dtype=np.int64).tobytes(), []).append(signal)
    return list(groups.values())


def _comparable(signals: Sequence[Signal]) -> np.ndarray:
    """Values as they are compared, `[signal, step]`: logs where all that is finite is positive."""
    values = np.array([signal.values for signal in signals], dtype=float)
    finite = np.isfinite(values)
    positive = np.where(finite, values, 1.0).min(1, initial=np.inf) > 0
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(positive[:, None], np.log(np.abs(values)), values)


def _leads(values: np.ndarray, at: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(For how many values before place `at` each signal has been outside its band, on which side, how far at most)."""
    begin = max(LEAST, at - HORIZON)
    reference = values[:, max(0, begin - REFERENCE) : begin]
    finite = np.isfinite(reference)
    known = finite.sum(1) >= LEAST // 2
    reference = np.where(known[:, None], np.where(finite, reference, np.nan), 0.0)
    middle_of = np.median if finite.all() else np.nanmedian  # the plain one is ten times as fast
    middle = middle_of(reference, 1)
    spread = NORMAL * middle_of(np.abs(reference - middle[:, None]), 1)
    spread = np.maximum(spread, ROUGH * np.maximum(np.abs(middle), 1.0))
    away = (values[:, begin:at] - middle[:, None]) / spread[:, None]
    away = np.where(np.isfinite(values[:, begin:at]), away, np.inf)
    best, side = np.zeros(len(values), dtype=int), np.zeros(len(values), dtype=int)
    length = np.arange(1, away.shape[1] + 1)
    for direction in (1, -1):
        outside = (direction * away >= WIDTH)[:, ::-1]  # the last value first
        lasts = outside & (outside.cumsum(1) >= (1 - RETURNS) * length) & outside[:, :1] & known[:, None]
        lead = np.where(lasts, length, 0).max(1, initial=0)
        best, side = np.where(lead > best, lead, best), np.where(lead > best, direction, side)
    with np.errstate(invalid="ignore"):  # a signal that is not outside has no side: 0 times an infinite value
        since = np.where(np.arange(away.shape[1]) >= away.shape[1] - best[:, None], side[:, None] * away, 0.0)
    return best, side, since.max(1, initial=0.0)


def _quiet(steps: np.ndarray, spikes: Sequence[Spike]) -> list[int]:
    """Places with a band that no spike is near: neither soon after them, nor among the values that are compared."""
    near = np.zeros(len(steps), dtype=bool)
    for spike in spikes:
        first, last = np.searchsorted(steps, [spike.first, spike.last])
        near[max(0, first - HORIZON) : last + HORIZON + REFERENCE + 1] = True
    quiet = [k for k in range(LEAST + 1, len(steps)) if not near[k]]
    return quiet[:: math.ceil(len(quiet) / QUIET) or 1]


def _adjusted(chances: np.ndarray, count: int) -> np.ndarray:
    """Chances corrected for so many signals, of which these are the smallest (Benjamini & Hochberg)."""
    order = np.argsort(chances)
    scaled = chances[order] * count / np.arange(1, len(chances) + 1)
    adjusted = np.empty(len(chances))
    adjusted[order] = np.minimum(np.minimum.accumulate(scaled[::-1])[::-1], 1.0)
    return adjusted

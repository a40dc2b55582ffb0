"""What a look at a training run gives: rows of one step, and what a rule said of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from rankscope.live.monitor.tally import Key, Tallies

TRAINING: dict[str, Any] = {
    "step": pl.Int64,
    "layer": pl.Int64,  # null where it is of the whole run, as the loss is
    "head": pl.Int64,  # null where it is not of a head
    "metric": pl.String,
    "value": pl.Float64,  # the mean over samples; null where none was a number
    "spread": pl.Float64,  # their standard deviation
    "least": pl.Float64,
    "most": pl.Float64,
    "floor": pl.Float64,  # below it a value is rounding; 0 where it has none
    "samples": pl.Int64,
    "broken": pl.Int64,  # samples whose value was no number
}
"""The columns of the table `training`: a row for each number of a look."""

ALARMS: dict[str, Any] = {
    "step": pl.Int64,
    "since": pl.Int64,  # the first look at which it was so
    "rule": pl.String,
    "layer": pl.Int64,
    "head": pl.Int64,
    "action": pl.String,
    "sentence": pl.String,
}
"""The columns of the table `alarms`."""

CERTIFICATES: dict[str, Any] = {
    "step": pl.Int64,
    "theorem": pl.String,
    "kind": pl.String,  # upper or lower bound
    "quantity": pl.String,
    "met_to": pl.Int64,  # its hypotheses hold from layer 1 to this one for every sample; 0: nowhere
    "says_at": pl.Int64,  # the last layer at which it says more than is known anyway
    "log10_bound": pl.Float64,  # there, of the sample with the most slack
    "log10_measured": pl.Float64,
    "log10_size": pl.Float64,
    "slack": pl.Float64,  # decades between the two
    "broken": pl.Int64,  # guarantees that the measurement contradicts; there should be none
    "why": pl.String,  # the first hypothesis that fails, with its number
}
"""The columns of the table `training_certificates`: `certify(...).summary()` of the probe, step by step."""


@dataclass(frozen=True)
class Alarm:
    """What a rule found."""

    step: int
    since: int
    rule: str
    layer: int | None
    head: int | None
    action: str
    sentence: str


@dataclass(frozen=True)
class Look:
    """One look: the rows of its step, and the alarms that were raised at it."""

    step: int
    rows: pl.DataFrame
    alarms: tuple[Alarm, ...] = ()
    certificates: pl.DataFrame | None = None
    """What is proved of the probe, where that was asked for at this step."""


def rows_of(step: int, keys: Sequence[Key], tallies: Tallies) -> pl.DataFrame:
    """The rows of a look."""
    number, mean, about, least, most, floor, broken = tallies.unbind(-1)
    none = (number == 0).tolist()

    def filled(column: Any) -> list[float | None]:
        return [None if empty else each for empty, each in zip(none, column.tolist(), strict=True)]

    return pl.DataFrame(
        {
            "step": [step] * len(keys),
            "layer": [key.layer for key in keys],
            "head": [key.head for key in keys],
            "metric": [key.metric for key in keys],
            "value": filled(mean),
            "spread": filled((about / number.clamp(min=1)).sqrt()),
            "least": filled(least),
            "most": filled(most),
            "floor": filled(floor),
            "samples": number.long().tolist(),
            "broken": broken.long().tolist(),
        },
        schema=TRAINING,
    )


def alarm_rows(alarms: Sequence[Alarm]) -> pl.DataFrame:
    """As the table `alarms` has them."""
    return pl.DataFrame(
        [[getattr(each, name) for name in ALARMS] for each in alarms], schema=ALARMS, orient="row"
    )

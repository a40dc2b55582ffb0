"""`Measurement`, what one measurement of a training run holds, and `RunWriter`, which writes it.

`Monitor` makes a `Measurement` of the running sums of a step (`rows_of`), and gives it to its `RunWriter` and
to the writers of `rankscope.live.writers`. Each table of the run folder is a `Journal`: rows are appended as
lines, and gathered into Parquet files. (`rankscope checkpoints` writes run folders in the same way.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from rankscope.live.monitor.running_sums import Key, Sums
from rankscope.runs import Manifest, Store
from rankscope.runs.journal import Journal
from rankscope.runs.training import ALARMS, CERTIFICATES, CERTIFICATES_TABLE, TRAINING

ENTRY = "training"  # the entry of the run folder's manifest


@dataclass(frozen=True)
class Alarm:
    """An alarm that a rule raised.

    Attributes:
        step: The step at which it was raised.
        since: The step at which the fault was first there.
        rule: The name of the rule.
        layer, head: Where the fault is; None if it is not of a layer or head.
        action: What is done: warn, stop or call.
        sentence: What is wrong, in numbers, and what helps.
    """

    step: int
    since: int
    rule: str
    layer: int | None
    head: int | None
    action: str
    sentence: str


@dataclass(frozen=True)
class Measurement:
    """One measurement of a training run, as writers receive it.

    Attributes:
        step: The step after which the model was measured.
        rows: A row for each number, with the columns of the table `training`.
        alarms: The alarms that were raised at this measurement.
        certificates: What theorems prove of the probe, if this measurement read paths.
    """

    step: int
    rows: pl.DataFrame
    alarms: tuple[Alarm, ...] = ()
    certificates: pl.DataFrame | None = None


def rows_of(step: int, keys: Sequence[Key], sums: Sums) -> pl.DataFrame:
    """The rows of a measurement from its running sums, of which `keys` says what each is of."""
    count, mean, squares, least, most, floor, broken = sums.unbind(-1)
    is_empty = (count == 0).tolist()

    def column(values: Any) -> list[float | None]:
        return [None if empty else value for empty, value in zip(is_empty, values.tolist(), strict=True)]

    return pl.DataFrame(
        {
            "step": [step] * len(keys),
            "layer": [key.layer for key in keys],
            "head": [key.head for key in keys],
            "metric": [key.metric for key in keys],
            "value": column(mean),
            "spread": column((squares / count.clamp(min=1)).sqrt()),
            "least": column(least),
            "most": column(most),
            "floor": column(floor),
            "samples": count.long().tolist(),
            "broken": broken.long().tolist(),
        },
        schema=TRAINING,
    )


def alarm_rows(alarms: Sequence[Alarm]) -> pl.DataFrame:
    """Alarms as rows of the table `alarms`."""
    return pl.DataFrame([vars(alarm) for alarm in alarms], schema=ALARMS)


class RunWriter:
    """Writes a training run into its folder, which nobody else can write to until `close`. A run that is
    killed loses at most the measurement that was being written. `certified`: measurements come with
    certificates, which get a table of their own."""

    def __init__(self, folder: str | Path, manifest: Manifest, certified: bool = False) -> None:
        self.store = Store(folder)
        self.certificates: Journal | None = None
        try:
            self.measurements = Journal(self.store, ENTRY, "training", TRAINING, manifest)
            self.alarms = Journal(self.store, ENTRY, "alarms", ALARMS, manifest)
            self.journals = [self.measurements, self.alarms]
            if certified or CERTIFICATES_TABLE in self.store.run.names:
                self.certificates = Journal(self.store, ENTRY, CERTIFICATES_TABLE, CERTIFICATES, manifest)
                self.journals.append(self.certificates)
        except BaseException:
            self.store.close()
            raise

    def write(self, measurement: Measurement) -> None:
        """Write a measurement with its alarms and certificates. Its own rows come last, so that a crash
        leaves no measurement without its alarms."""
        if measurement.alarms:
            self.alarms.append(measurement.step, alarm_rows(measurement.alarms))
        certificates = measurement.certificates
        if self.certificates is not None and certificates is not None and len(certificates):
            self.certificates.append(measurement.step, certificates)
        self.measurements.append(measurement.step, measurement.rows)

    def cut(self, step: int) -> None:
        """Remove the rows of all steps after this one."""
        for journal in self.journals:
            journal.cut(step)

    def close(self) -> None:
        """Gather the last lines into Parquet files and release the folder."""
        if not self.store.closed:
            for journal in self.journals:
                journal.gather()
            self.store.close()

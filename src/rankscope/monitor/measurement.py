"""`Measurement`, what one measurement of a training run holds; `RunWriter`, which writes it; and `Failures`, which
keeps errors of the monitor away from the training.

`Monitor` makes a `Measurement` of the running sums of a step (`rows_of`), and gives it to its `RunWriter` and
to the writers of `rankscope.monitor.writers`. Each table of the run folder is a `Journal`: rows are appended as
lines, and gathered into Parquet files. (`rankscope checkpoints` writes run folders in the same way.)

`Monitor` does what may fail inside `Failures.contained`. Once the model was measured, an error there becomes a warning
and an alarm about the monitor itself, which `Monitor` writes at the end of the call. While the disk is full it waits
there (`RunWriter.write_alarms`).
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from rankscope.errors import MonitorError, TrainingWarning
from rankscope.live import processes
from rankscope.monitor.running_sums import Key, Sums
from rankscope.runs import Journal, Manifest, Store
from rankscope.sources import first_line
from rankscope.trainings import ALARMS, CERTIFICATES, CERTIFICATES_TABLE, TRAINING, TrainingRun

ENTRY = "training"  # the entry of the run folder's manifest
UNMEASURED = "not measured"  # the name of alarms about the monitor itself


@dataclass(frozen=True)
class Alarm:
    """An alarm that a rule raised."""

    step: int  # at which it was raised
    since: int  # the step at which the fault was first there
    rule: str  # the name of the rule
    layer: int | None  # where the fault is; None if it is of no layer
    head: int | None  # None if it is of no head
    action: str  # what is done: warn, stop or call
    sentence: str  # what is wrong, in numbers, and what helps


@dataclass(frozen=True)
class Measurement:
    """One measurement of a training run, as writers receive it."""

    step: int  # after which the model was measured
    rows: pl.DataFrame  # a row for each number, with the columns of the table `training`
    alarms: tuple[Alarm, ...] = ()  # those that were raised at this measurement
    certificates: pl.DataFrame | None = None  # what theorems prove of the probe, if this measurement read paths


def rows_of(step: int, keys: Sequence[Key], sums: Sums) -> pl.DataFrame:
    """The rows of a measurement from its running sums, of which `keys` says what each is of."""
    count, mean, squares, least, most, floor, broken = sums.unbind(-1)
    spread = (squares / count.clamp(min=1)).sqrt()
    columns: dict[str, list[Any]] = {"step": [step] * len(keys)}
    columns |= {name: [getattr(key, name) for key in keys] for name in Key._fields}
    for name, numbers in {"value": mean, "spread": spread, "least": least, "most": most, "floor": floor}.items():
        columns[name] = [x if samples else None for x, samples in zip(numbers.tolist(), count.tolist(), strict=True)]
    columns |= {"samples": count.long().tolist(), "broken": broken.long().tolist()}
    return pl.DataFrame(columns, schema=TRAINING)


def alarm_rows(alarms: Sequence[Alarm]) -> pl.DataFrame:
    """Alarms as rows of the table `alarms`."""
    return pl.DataFrame([vars(alarm) for alarm in alarms], schema=ALARMS)


class RunWriter:
    """Writes a training run into its folder, which nobody else can write to until `close`. A run that is killed loses
    at most the measurement that was being written. If `certified`, certificates get a table of their own."""

    def __init__(self, folder: str | Path, manifest: Manifest, certified: bool = False) -> None:
        self.store = Store(folder)
        self.waiting: list[Alarm] = []  # alarms that could not be written yet
        try:
            self.measurements = Journal(self.store, ENTRY, "training", TRAINING, manifest, TrainingRun.kind)
            self.alarms = Journal(self.store, ENTRY, "alarms", ALARMS, manifest)
            names = [CERTIFICATES_TABLE] * (certified or CERTIFICATES_TABLE in self.store.run.names)
            self.certificates = [Journal(self.store, ENTRY, name, CERTIFICATES, manifest) for name in names]
        except BaseException:
            self.store.close()
            raise
        self.journals = [self.measurements, self.alarms, *self.certificates]

    def write(self, measurement: Measurement) -> None:
        """Write a measurement, its own rows last: so a crash leaves none without its alarms and certificates."""
        self.write_alarms(measurement.step, measurement.alarms)
        for journal in self.certificates:
            if measurement.certificates is not None and len(measurement.certificates):
                journal.append(measurement.step, measurement.certificates)
        self.measurements.append(measurement.step, measurement.rows)

    def write_alarms(self, step: int, alarms: Sequence[Alarm]) -> None:
        """Write the alarms of a step. If it has some already, or the disk is full, they wait for the next call."""
        if self.store.closed:  # another process may be writing
            raise MonitorError(f"{self.store.folder} was closed with its monitor: make a new one", subject="run")
        self.waiting += alarms
        if not self.waiting:  # as after nearly every step of a training: nothing is read from the disk
            return
        last = self.alarms.last
        if last is None or last < step:
            self.alarms.append(step, alarm_rows(self.waiting))
            self.waiting = []

    def describe(self, **values: Any) -> None:
        """Put values into the manifest of the run, in place of earlier ones of the same names."""
        earlier = self.store.run.manifests[ENTRY]
        if (manifest := earlier.adding(**values)) != earlier:
            self.store.describe(ENTRY, manifest)

    def cut(self, step: int) -> None:
        """Remove the rows of all steps after this one."""
        self.waiting = [alarm for alarm in self.waiting if alarm.step <= step]
        for journal in self.journals:
            journal.cut(step)

    def close(self) -> None:
        """Gather the last lines into Parquet files, or on a full disk leave them lines, and release the folder."""
        if not self.store.closed:
            for journal in self.journals:
                with suppress(OSError):
                    journal.gather()
            self.store.close()


class Failures:
    """What fails in a monitor, and the alarms that say so; `current_step` gives the number of the last step."""

    def __init__(self, current_step: Callable[[], int]) -> None:
        self.measured = False  # True once the model was measured: from then on nothing is raised
        self.sentences: dict[str, str] = {}  # by fault, what fails now
        self.alarms: list[Alarm] = []  # raised since `take`
        self._current_step = current_step
        self._good_steps: dict[str, int] = {}  # by fault, the last step without it, or else the first with it

    @contextmanager
    def contained(self, fault: str, from_start: bool = False) -> Iterator[None]:
        """Inside, errors are raised until the model was measured, unless they are contained `from_start`; later they
        become an alarm, once while the fault lasts, that says since which step there is this `fault`."""
        try:
            yield
        except Exception as error:
            if not (self.measured or from_start):
                raise
            step = self._current_step()
            since = self._good_steps.setdefault(fault, step)
            why = f"{type(error).__name__}: {first_line(error)}"
            sentence = f"Step {step}: {fault} since step {since}: {why}. The training goes on."
            known = fault in self.sentences
            self.sentences[fault] = sentence
            if not known and processes.is_writer():
                self.alarms.append(Alarm(step, since, UNMEASURED, None, None, "warn", sentence))
                warnings.warn(sentence, TrainingWarning, stacklevel=5)
        else:
            self.sentences.pop(fault, None)
            self._good_steps[fault] = self._current_step()

    def take(self) -> list[Alarm]:
        """The alarms that were raised since this was called last."""
        alarms, self.alarms = self.alarms, []
        return alarms

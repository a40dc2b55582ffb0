"""Writes the measurements and alarms of a training run into its run folder.

`Monitor` (and `rankscope checkpoints`) makes one `RunWriter`, which holds the folder's lock until it is
closed. Each table is a `runs.journal.Journal`: rows are appended as lines, and gathered into Parquet files.
"""

from pathlib import Path

from rankscope.live.monitor.measurement import ALARMS, CERTIFICATES, TRAINING, Measurement, alarm_rows
from rankscope.runs import Manifest, Store
from rankscope.runs.journal import Journal
from rankscope.runs.training import CERTIFICATES_TABLE

ENTRY = "training"


class RunWriter:
    """Writes one training run. A run that is killed loses at most the measurement that was being written.

    Args:
        folder: The run folder; nobody else can write to it until `close`.
        manifest: What the run is of.
        certified: True if measurements will come with certificates, which then get a table of their own.
    """

    def __init__(self, folder: str | Path, manifest: Manifest, certified: bool = False) -> None:
        self.store = Store(folder)
        self.certificates: Journal | None = None
        try:
            self.measurements = Journal(self.store, ENTRY, "training", TRAINING, manifest)
            self.alarms = Journal(self.store, ENTRY, "alarms", ALARMS, manifest)
            if certified or CERTIFICATES_TABLE in self.store.run.names:
                self.certificates = Journal(self.store, ENTRY, CERTIFICATES_TABLE, CERTIFICATES, manifest)
        except BaseException:
            self.store.close()
            raise

    @property
    def last(self) -> int | None:
        """The step of the last measurement; None if there is none yet."""
        return self.measurements.last

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
        for journal in self._journals():
            journal.cut(step)

    def close(self) -> None:
        """Gather the last lines into Parquet files and release the folder."""
        if not self.store.closed:
            for journal in self._journals():
                journal.gather()
            self.store.close()

    def _journals(self) -> list[Journal]:
        journals = [self.measurements, self.alarms]
        return journals if self.certificates is None else [*journals, self.certificates]

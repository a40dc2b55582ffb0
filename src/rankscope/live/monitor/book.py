"""What a monitor has written: the looks and alarms of a training run, in a run folder."""

from pathlib import Path

from rankscope.live.monitor.looks import ALARMS, TRAINING, Look, alarm_rows
from rankscope.runs import Manifest, Store
from rankscope.runs.journal import Journal

ENTRY = "training"


class Book:
    """One writer; a run that is killed loses at most the look that was being written."""

    def __init__(self, folder: str | Path, manifest: Manifest) -> None:
        self.store = Store(folder)
        try:
            self.looks = Journal(self.store, ENTRY, "training", TRAINING, manifest)
            self.alarms = Journal(self.store, ENTRY, "alarms", ALARMS, manifest)
        except BaseException:
            self.store.close()
            raise

    @property
    def last(self) -> int | None:
        """The step of the last look."""
        return self.looks.last

    def write(self, look: Look) -> None:
        """Alarms first: a look that is there is there with its alarms."""
        if look.alarms:
            self.alarms.append(look.step, alarm_rows(look.alarms))
        self.looks.append(look.step, look.rows)

    def cut(self, step: int) -> None:
        """Take away what came after this step."""
        self.looks.cut(step)
        self.alarms.cut(step)

    def close(self) -> None:
        """Gather what is left, and let others write."""
        if not self.store.closed:
            self.looks.gather()
            self.alarms.gather()
            self.store.close()

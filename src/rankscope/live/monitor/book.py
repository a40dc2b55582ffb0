"""What a monitor has written: the looks and alarms of a training run, in a run folder."""

from pathlib import Path

from rankscope.live.monitor.looks import ALARMS, CERTIFICATES, TRAINING, Look, alarm_rows
from rankscope.runs import Manifest, Store
from rankscope.runs.journal import Journal
from rankscope.runs.training import PROVED

ENTRY = "training"


class Book:
    """One writer; a run that is killed loses at most the look that was being written."""

    def __init__(self, folder: str | Path, manifest: Manifest, certified: bool = False) -> None:
        """`certified`: whether there will be certificates."""
        self.store = Store(folder)
        self.certificates: Journal | None = None
        try:
            self.looks = Journal(self.store, ENTRY, "training", TRAINING, manifest)
            self.alarms = Journal(self.store, ENTRY, "alarms", ALARMS, manifest)
            if certified or PROVED in self.store.run.names:
                self.certificates = Journal(self.store, ENTRY, PROVED, CERTIFICATES, manifest)
        except BaseException:
            self.store.close()
            raise

    @property
    def last(self) -> int | None:
        """The step of the last look."""
        return self.looks.last

    def write(self, look: Look) -> None:
        """The others first: a look that is there is there with its alarms and certificates."""
        if look.alarms:
            self.alarms.append(look.step, alarm_rows(look.alarms))
        if self.certificates is not None and look.certificates is not None and len(look.certificates):
            self.certificates.append(look.step, look.certificates)
        self.looks.append(look.step, look.rows)

    def cut(self, step: int) -> None:
        """Take away what came after this step."""
        for journal in self._journals():
            journal.cut(step)

    def close(self) -> None:
        """Gather what is left, and let others write."""
        if not self.store.closed:
            for journal in self._journals():
                journal.gather()
            self.store.close()

    def _journals(self) -> list[Journal]:
        found = [self.looks, self.alarms]
        return found if self.certificates is None else [*found, self.certificates]

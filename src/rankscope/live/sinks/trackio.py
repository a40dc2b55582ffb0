"""Looks in a run of Trackio."""

from typing import Any

from rankscope.live.monitor.looks import Look
from rankscope.live.sinks.scalars import imported, scalars


class Trackio:
    """Into the run that is open, or a new one of `project`: `init` is what `trackio.init` takes.

    A new one is finished with the monitor; another's is left open. Alarms are Trackio's alerts.
    """

    def __init__(self, project: str = "rankscope", **init: Any) -> None:
        self.project, self.init = project, init
        self._run: Any = None
        self._own = False
        imported("trackio")

    def __call__(self, look: Look) -> None:
        """The numbers of one look."""
        if self._run is None:
            trackio = imported("trackio")
            found = imported("trackio.context_vars").current_run.get()
            self._own = found is None
            self._run = trackio.init(self.project, **self.init) if found is None else found
        self._run.log(scalars(look), step=look.step)
        for alarm in look.alarms:
            self._run.alert(title=alarm.rule, text=alarm.sentence, step=look.step)

    def close(self) -> None:
        """Finish the run, if it is ours."""
        if self._own and self._run is not None:
            imported("trackio").finish()
        self._run, self._own = None, False

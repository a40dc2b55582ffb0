"""Looks in a run of Weights & Biases."""

from typing import Any

from rankscope.live.monitor.looks import Look
from rankscope.live.sinks.scalars import imported, scalars

STEP = "monitor/step"
"""The axis that our numbers are drawn over. wandb's own counts calls of `log`, whoever makes them."""


class WandB:
    """Into `run`, or the run that is open (`wandb.run`), or a new one: `init` is what `wandb.init` takes.

    A new one is finished with the monitor; another's is left open. Alarms are wandb's alerts.
    """

    def __init__(self, run: Any = None, **init: Any) -> None:
        self.given, self.init = run, init
        self._run: Any = None
        self._own = False
        self._drawn: set[str] = set()
        imported("wandb")

    def __call__(self, look: Look) -> None:
        """The numbers of one look."""
        wandb = imported("wandb")
        if self._run is None:
            found = wandb.run if self.given is None else self.given
            self._own = found is None
            self._run = wandb.init(**self.init) if found is None else found
            self._run.define_metric(STEP, hidden=True)
        numbers = scalars(look)
        for name in numbers.keys() - self._drawn:
            self._run.define_metric(name, step_metric=STEP)
        self._drawn |= numbers.keys()
        self._run.log({STEP: look.step, **numbers})
        for alarm in look.alarms:
            self._run.alert(title=alarm.rule, text=alarm.sentence, level=wandb.AlertLevel.WARN)

    def close(self) -> None:
        """Finish the run, if it is ours."""
        if self._own and self._run is not None:
            self._run.finish()
        self._run, self._own, self._drawn = None, False, set()

"""Looks as TensorBoard's scalars, and alarms as its text."""

from pathlib import Path
from typing import Any

from rankscope.live.monitor.looks import Look
from rankscope.live.sinks.scalars import imported, scalars


class TensorBoard:
    """Event files in `folder`: `tensorboard --logdir folder` shows them while they are written.

    What a run that went back to an earlier step had written of later ones is purged, as TensorBoard does it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._writer: Any = None
        imported("tensorboard")

    def __call__(self, look: Look) -> None:
        """The numbers of one look."""
        if self._writer is None:
            tensorboard = imported("torch.utils.tensorboard")
            self._writer = tensorboard.SummaryWriter(str(self.folder), purge_step=look.step)
        for name, value in scalars(look).items():
            self._writer.add_scalar(name, value, look.step)
        for alarm in look.alarms:
            self._writer.add_text(f"alarms/{alarm.rule}", alarm.sentence, look.step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

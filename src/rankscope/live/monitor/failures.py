"""`Failures`: keeps errors of the monitor away from the training.

`Monitor` does what may fail inside `Failures.contained`. Once the model was measured, an error there becomes a warning
and an alarm about the monitor itself. While the disk is full the alarm waits, and is written with the next measurement
that can be written (`Monitor._measure`), or when the monitor is closed.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from rankscope.errors import TrainingWarning
from rankscope.live.monitor.measurement import Alarm, RunWriter
from rankscope.sources.checkpoint import first_line

UNMEASURED = "not measured"  # the name of alarms about the monitor itself


class Failures:
    """What fails in a monitor, and the alarms that say so.

    Args:
        current_step: A function that returns the number of the last step.
    """

    def __init__(self, current_step: Callable[[], int]) -> None:
        self.measured = False  # True once the model was measured: from then on nothing is raised
        self.run_writer: RunWriter | None = None  # None on processes that do not write: these do not warn, either
        self.sentences: dict[str, str] = {}  # by fault, what fails now
        self.waiting: list[Alarm] = []  # alarms that are not written yet
        self._current_step = current_step
        self._good_steps: dict[str, int] = {}  # by fault, the last step without it

    @contextmanager
    def contained(self, fault: str) -> Iterator[None]:
        """Inside, errors are raised until the model was measured; later they become an alarm, once while the
        fault lasts, that says since which step there is this `fault`."""
        try:
            yield
        except Exception as error:
            if not self.measured:
                raise
            step = self._current_step()
            since = self._good_steps.get(fault, step)
            why = f"{type(error).__name__}: {first_line(error)}"
            sentence = f"Step {step}: {fault} since step {since}: {why}. The training goes on."
            known = fault in self.sentences
            self.sentences[fault] = sentence
            if not known and self.run_writer is not None:
                self.waiting.append(Alarm(step, since, UNMEASURED, None, None, "warn", sentence))
                self.write_waiting()
                warnings.warn(sentence, TrainingWarning, stacklevel=5)
        else:
            self.sentences.pop(fault, None)
            self._good_steps[fault] = self._current_step()

    def write_waiting(self) -> None:
        """Write the alarms that wait; those that cannot be written go on waiting."""
        with suppress(Exception):
            if self.run_writer is not None and self.run_writer.write_alarms(self._current_step(), self.waiting):
                self.waiting = []

    def remove_written(self, alarms: Sequence[Alarm]) -> None:
        """Forget the alarms that were written with a measurement."""
        self.waiting = [alarm for alarm in self.waiting if alarm not in alarms]

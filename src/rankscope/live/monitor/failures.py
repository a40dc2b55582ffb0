"""`Failures`: keeps errors of the monitor away from the training.

`Monitor` does what may fail inside `Failures.contained`. Once the model was measured, an error there becomes a warning
and an alarm about the monitor itself, which `Monitor` writes at the end of the call. While the disk is full it waits
there (`RunWriter.write_alarms`).
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rankscope.errors import TrainingWarning
from rankscope.live.monitor import distributed
from rankscope.live.monitor.measurement import Alarm
from rankscope.sources import first_line

UNMEASURED = "not measured"  # the name of alarms about the monitor itself


class Failures:
    """What fails in a monitor, and the alarms that say so.

    Args:
        current_step: A function that returns the number of the last step.
    """

    def __init__(self, current_step: Callable[[], int]) -> None:
        self.measured = False  # True once the model was measured: from then on nothing is raised
        self.sentences: dict[str, str] = {}  # by fault, what fails now
        self.alarms: list[Alarm] = []  # raised since `take`
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
            if not known and distributed.is_writer():
                self.alarms.append(Alarm(step, since, UNMEASURED, None, None, "warn", sentence))
                warnings.warn(sentence, TrainingWarning, stacklevel=5)
        else:
            self.sentences.pop(fault, None)
            self._good_steps[fault] = self._current_step()

    def take(self) -> list[Alarm]:
        """The alarms that were raised since this was called last."""
        alarms, self.alarms = self.alarms, []
        return alarms

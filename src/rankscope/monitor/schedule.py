"""`Schedule`: which steps of a training `Monitor` measures; `StepNumbers`: the numbers that it is given with them."""

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rankscope.errors import MonitorError
from rankscope.live import require_agreement
from rankscope.monitor.instrument import Instrument
from rankscope.monitor.running_sums import MetricValues

STRIDES = 16  # how many strides of steps are remembered


class Schedule:
    """Counts steps, and says which are measured, and before which recording must be switched on.

    A measurement is due when the counter reaches or passes a multiple of `every`, so that a loop may count by any
    stride: by ones with `every=10` steps 10, 20, 30 are measured, by fours steps 12, 20, 32. Gradients and training
    batches must be recorded while the step is being made: so recording is switched on before every step that may be
    measured, one that would cross a multiple if its stride were the largest of the last few, and the first step, whose
    stride nobody knows.
    """

    def __init__(self, step: int) -> None:
        self.step, self.previous, self.first, self.counted = step, step - 1, step, 0
        self.strides: deque[int] = deque(maxlen=STRIDES)

    def advance(self, step: int | None) -> None:
        """Move to a later step; None: the next one."""
        step = self.step + 1 if step is None else int(step)
        if step <= self.step:
            expected = "after going back to a checkpoint, call monitor.load_state_dict(...) or monitor.resume(step)"
            raise MonitorError(f"steps must grow; step {step} came after {self.step}: {expected}", subject="step")
        self.strides.append(step - self.step)
        self.step, self.previous, self.counted = step, self.step, self.counted + 1

    def crossed(self, every: int) -> bool:
        """True if the last step reached or passed a multiple of `every`; step 0 is one."""
        return self.step // every > self.previous // every

    def may_cross(self, every: int) -> bool:
        """True if the next step may reach or pass a multiple of `every`."""
        return (self.step + max(self.strides, default=every)) // every > self.step // every


class StepNumbers(Instrument):
    """Keeps the numbers that `Monitor.step` is given, such as the loss, and reads their means since the last
    measurement."""

    name, subject, must_work = "scalars", "numbers given to monitor.step are", True

    def __init__(self) -> None:
        self.given: dict[str, list[Tensor]] = {}  # since the last measurement

    def add(self, numbers: Mapping[str, Any]) -> None:
        """Keep the numbers of a step; one that is None is left out. Tensors stay on their device: copying them would
        make the device wait at every step."""
        for name, value in [(name, _scalar(value)) for name, value in numbers.items() if value is not None]:
            self.given.setdefault(name, []).append(value)

    def read(self, step: int) -> MetricValues:
        """The numbers of all steps since the last measurement."""
        require_agreement("numbers in monitor.step", sorted(self.given), self.monitor.stage.first_block)
        values = MetricValues()
        for name, numbers in sorted(self.given.items()):
            values.add(None, name, torch.stack([value.double().cpu().reshape(()) for value in numbers]))
        return values

    def state_dict(self) -> dict[str, list[Tensor]]:
        """The numbers that are not yet measured."""
        return {name: list(numbers) for name, numbers in self.given.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the numbers of a checkpoint."""
        self.given = {name: list(map(_scalar, numbers)) for name, numbers in state.items()}


def _scalar(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    return torch.tensor(float(value), dtype=torch.float64, device="cpu")

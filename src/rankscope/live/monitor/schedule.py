"""`Schedule`: which steps of a training `Monitor` measures."""

from collections import deque

from rankscope.errors import MonitorError

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

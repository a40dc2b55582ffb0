"""`Instrument`: one thing that a monitor reads of a training; what is shipped and what a user adds are made alike.

A `Monitor` is a schedule, a list of instruments, alarm rules and a run folder. Its `Schedule` says which steps are
measured. It calls each instrument in this order:

1. `attach`, when the monitor is made: the instrument looks at the model, attaches hooks, or refuses with a sentence.
2. `record`, before every step: whether that step may be measured, for what must be seen while the step is made.
3. `read`, at each measurement: values of layers, heads or the run, which become rows of the table `training`, go to
   the writers and are looked at by alarm rules. An instrument with `on_measurement(rows, step)` is an alarm rule, too.
4. `notes`, `state_dict` and `load_state_dict` at any time, `close` at the end.

An instrument that fails at a measurement is an alarm, a warning and a note; the others' readings stand. `monitor.py`
makes those that its switches ask for, each in a file of its own:

| instrument | reads |
|---|---|
| `Probe`, `TrainingBatches` (`inline.py`) | metrics of each layer, and gradients at its tokens |
| `BlockJacobians` | norms and alignments of Jacobians of blocks on the probe |
| `StepNumbers` (below) | loss and other numbers that `step` is given |
| `ProbeEmbeddings`, `ProbePaths` | collapse across the probe's samples; path shares and certificates |
| `WeightGradients`, `WeightSpectra` | gradients and updates of weights, their norms and stable ranks |
| `RuleSet` (`alarms.py`), `ForecastCheck` | nothing more: they look at what the others have read |
"""

from collections import deque
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rankscope.errors import MonitorError
from rankscope.live import WatchPlan, require_agreement
from rankscope.monitor.measurement import MetricValues, joined_stacks

STRIDES = 16  # how many strides of steps are remembered


class Instrument:
    """One thing that a monitor reads. One of your own defines `read_stack`, or `read`; all else has a default.

    >>> class WeightSize(Instrument):
    ...     name, metrics = "weight size", ("weight_size",)
    ...     def read_stack(self, plan):
    ...         values = MetricValues()
    ...         for layer, block in enumerate(plan.blocks, 1):
    ...             values.add(layer, "weight_size", max(w.detach().norm() for w in block.parameters()))
    ...         return values
    """

    monitor: Any
    """The `Monitor`, set before `attach`: it has the `model`, the `plans` of its stacks of blocks by name (`blocks`,
    `measures(layer)`), the `probe`, `every` and `steps`."""
    name: str  # what it is called, also in `Monitor(instruments=[...])` where a package declares it
    metrics: Sequence[str] = ()  # the names of what it reads, as far as alarm rules ask for them
    keeps: Sequence[str] = ()  # tensors that a watch of the probe is to keep for it, such as "embeddings"
    of_samples = True
    """True if it reads samples of the probe or of training batches, which count once where several processes have the
    same; False of what it reads of weights."""
    must_work = False  # True: what fails before anything was measured is raised, also in a run that is resumed
    recording = False  # True while the step that comes next is recorded

    def __repr__(self) -> str:
        return self.name

    @property
    def subject(self) -> str:
        """What is or is not measured, with its verb: the beginning of sentences on it."""
        return f"the instrument {self.name!r} is"

    @cached_property
    def remarks(self) -> list[str]:
        """Sentences on what is not measured: append to them."""
        return []

    @property
    def notes(self) -> list[str]:
        """What `monitor.notes` says of it."""
        return self.remarks

    def attach(self) -> None:
        """Begin with `self.monitor`: look at its `model`, `plans`, `probe`, or attach hooks.

        Raises:
            MonitorError: The instrument cannot read this model, with a sentence on what to do.
        """

    def record(self, on: bool) -> None:
        """Drop what was recorded, and record the step that comes next or not."""

    def read(self, step: int) -> MetricValues:
        """What is measured after this step: by default what `read_stack` gives of each stack of blocks, under metrics
        with the stack's name where there are several."""
        return joined_stacks({stack: self.read_stack(plan) for stack, plan in self.monitor.plans.items()})

    def read_stack(self, plan: WatchPlan) -> MetricValues:
        """What is measured of one stack of blocks; nothing by default."""
        return MetricValues()

    def state_dict(self) -> Mapping[str, Any]:
        """What a checkpoint must hold for the instrument to go on as if nothing had happened."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave; of a checkpoint without the instrument it is empty."""

    def close(self) -> None:
        """Remove all hooks, when the monitor is closed."""


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

"""In a Hugging Face `Trainer`:

    from rankscope.live.loops.transformers import MonitorCallback
    trainer.add_callback(MonitorCallback(probe=batch, every=100, run="runs/mine"))

- Steps are `state.global_step`: one for each step of the optimiser, however many batches it accumulates.
- Loss and learning rate are those that Trainer logs, each the mean over its `logging_steps`: a look has them
  where something was logged since the last one. (Trainer leaves a loss that is no number out of what it logs
  unless `logging_nan_inf_filter=False`.)
- `bf16=True` is autocast inside the `forward` of the model, which accelerate has replaced: the probe goes
  through it as the training does.
- `trainer.train(resume_from_checkpoint=...)` goes on in the same folder, from the step and the logs that are
  in the checkpoint; what was written of later steps is taken away.
- Trainer tells its callbacks nothing when training raises. What was seen is in the folder by then; it is let
  go by `close()`, by the next `train()` with this callback, or when the process ends.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from rankscope.extras import need
from rankscope.live.monitor import Monitor
from rankscope.live.monitor.gradients import plain

need("this callback", "transformers", "accelerate")  # Trainer wants both
# ruff: noqa: E402  What follows is there: else the line above has said what is missing.
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

LOGGED = {"loss": "loss", "learning_rate": "lr"}
"""What Trainer logs, by the name it has here."""


class MonitorCallback(TrainerCallback):
    """A monitor for as long as `train()` runs; `options` are those of `Monitor`, less the model."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.monitor: Monitor | None = None
        """There from the beginning of the training on."""
        self._made: int | None = None  # a step whose log is still to come
        self._logged: dict[str, float] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Begin, or go on where the checkpoint stands."""
        self.close()
        model: nn.Module = given["model"]
        options = {"optimizer": plain(given.get("optimizer")), **self.options}
        monitor = self.monitor = Monitor(model, step=state.global_step, **options)
        if state.global_step:
            looked = state.global_step - state.global_step % monitor.every
            since = [_numbers(logs) for logs in state.log_history if logs["step"] > looked]
            names = dict.fromkeys(name for logs in since for name in logs)
            scalars = {name: [logs[name] for logs in since if name in logs] for name in names}
            monitor.load_state_dict({"step": state.global_step, "scalars": scalars})

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """The optimiser has made a step; where Trainer is about to log its loss, that comes first."""
        self._made = state.global_step
        if not control.should_log:
            self._step(control)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **given: Any,
    ) -> None:
        """The loss since the last time; before the step is evaluated and saved."""
        self._logged |= _numbers(logs or {})
        self._step(control)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """A step that was to be logged and was not is made before the next."""
        self._step(control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Let the model and the folder go."""
        self._step(control)
        self.close()

    def close(self) -> None:
        """Let the model and the folder go; for a training that raised."""
        if self.monitor is not None:
            self.monitor.close()
        self._made, self._logged = None, {}

    def _step(self, control: TrainerControl) -> None:
        if self._made is None or self.monitor is None:
            return
        made, logged = self._made, self._logged
        self._made, self._logged = None, {}
        self.monitor.step(made, **logged)
        if self.monitor.should_stop:
            control.should_training_stop = True


def _numbers(logs: Mapping[str, float]) -> dict[str, float]:
    return {ours: logs[theirs] for theirs, ours in LOGGED.items() if theirs in logs}

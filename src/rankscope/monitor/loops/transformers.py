"""`MonitorCallback`: a `Monitor` as a callback of the Hugging Face `Trainer`.

    from rankscope.monitor.loops.transformers import MonitorCallback
    trainer.add_callback(MonitorCallback(probe=batch, every=100, run="runs/mine"))

- Steps are `state.global_step`: one for each step of the optimiser, however many batches it accumulates.
- Loss and learning rate are those that Trainer logs, each the mean over its `logging_steps`: a measurement
  has them if something was logged since the last one. (Trainer leaves a loss that is NaN or infinite out of
  its logs unless `logging_nan_inf_filter=False`.)
- `bf16=True` is autocast inside the model's `forward`, which accelerate has replaced: the probe goes through
  it as training batches do.
- Metrics of an evaluation have the numbers of layers in the last measurement, for `metric_for_best_model=
  "relative_mu/layer_06"`, and for an `EarlyStoppingCallback` that comes after this callback.
- `trainer.train(resume_from_checkpoint=...)` continues in the same folder, from the step and the logs in the
  checkpoint; what was written of later steps is removed.
- Trainer does not tell its callbacks when training raises. The run folder has all measurements by then; it is
  released by `close()`, by the next `train()` with this callback, or when the process ends.
"""

from collections.abc import Mapping
from typing import Any

from rankscope.extras import need
from rankscope.monitor import Monitor
from rankscope.monitor.loops import last_numbers, named_options
from rankscope.monitor.weight_gradients import torch_optimizer

need("this callback", "transformers", "accelerate")  # Trainer needs both
# ruff: noqa: E402  The line above has raised a sentence if these cannot be imported.
from transformers.trainer_callback import TrainerCallback

LOGGED = {"loss": "loss", "learning_rate": "lr"}  # our name of each number that Trainer logs


class MonitorCallback(TrainerCallback):
    """A `Monitor` for as long as `Trainer.train` runs; `monitor` is None before.

    Args:
        *positional: The metrics, if they are not among the options.
        **options: What `Monitor` takes, but for the model and the step. By default `optimizer` is the trainer's.

    Raises:
        MonitorError: `Monitor` has no such option.

    >>> MonitorCallback(every=100, run="runs/mine").options["every"]
    100
    """

    def __init__(self, *positional: object, **options: Any) -> None:
        self.options = named_options("MonitorCallback", positional, options)
        self.monitor: Monitor | None = None
        self._waiting: int | None = None  # a step whose log is still to come
        self._logged: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin, or continue from the checkpoint that was loaded."""
        self.close()
        options = {"optimizer": torch_optimizer(kwargs.get("optimizer")), **self.options}
        monitor = self.monitor = Monitor(kwargs["model"], step=state.global_step, **options)
        if state.global_step:
            measured = state.global_step - state.global_step % monitor.every
            logs = [_numbers(entry) for entry in state.log_history if entry["step"] > measured]
            names = dict.fromkeys(name for entry in logs for name in entry)
            scalars = {name: [entry[name] for entry in logs if name in entry] for name in names}
            monitor.load_state_dict({"step": state.global_step, "scalars": scalars})

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that the optimiser has made a step; if Trainer is about to log its loss, wait for that."""
        self._waiting = state.global_step
        if not control.should_log:
            self._step(control)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the loss since the last log, before the step is evaluated and saved."""
        self._logged |= _numbers(kwargs.get("logs") or {})
        self._step(control)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count a step that was to be logged and was not, before the next one is made."""
        self._step(control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the last measurement to the metrics of an evaluation: by these Trainer chooses the best model."""
        kwargs.get("metrics", {}).update((f"eval_{name}", value) for name, value in last_numbers(self.monitor).items())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the last step, and close the monitor."""
        self._step(control)
        self.close()

    def close(self) -> None:
        """Close the monitor, if there is one; call it after a training that raised."""
        if self.monitor is not None:
            self.monitor.close()
        self._waiting, self._logged = None, {}

    def _step(self, control: Any) -> None:
        if self._waiting is None or self.monitor is None:
            return
        step, logged = self._waiting, self._logged
        self._waiting, self._logged = None, {}
        self.monitor.step(step, **logged)
        if self.monitor.should_stop:
            control.should_training_stop = True


def _numbers(logs: Mapping[str, float]) -> dict[str, float]:
    return {ours: logs[theirs] for theirs, ours in LOGGED.items() if theirs in logs}

"""`LightningMonitor`: a `Monitor` as a callback of a Lightning `Trainer`.

    from rankscope.monitor.loops.lightning import LightningMonitor
    trainer = Trainer(callbacks=[LightningMonitor(probe=batch, every=100, run="runs/mine")])

- Steps are `trainer.global_step`: one for each step of the optimiser, however many batches it accumulates.
  Lightning counts the steps of several optimisers together; here they are divided by their number. A
  `training_step` that makes several steps of one optimiser counts by that stride.
- The loss is what `training_step` returns, the mean over accumulated batches; the learning rate is that of the first
  parameter group of the first optimiser, as the step was made with it. Gradients are those of the first optimiser.
- The probe is given to the `LightningModule` itself, or to a part of it (`part="model"`), under the
  precision of the strategy: autocast if training uses it.
- `trainer.callback_metrics` has the numbers of layers in the last measurement: `EarlyStopping("relative_mu/layer_06")`.
- `trainer.fit(..., ckpt_path=...)` continues in the same folder; what was written of later steps is removed.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rankscope.errors import MissingExtraError, MonitorError
from rankscope.monitor import Monitor
from rankscope.monitor.loops import last_numbers, named_options
from rankscope.monitor.weight_gradients import torch_optimizer

if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        try:
            from pytorch_lightning import Callback
        except ImportError as error:
            sentence = "this callback is for Lightning, which is not installed: pip install 'rankscope[lightning]'"
            raise MissingExtraError(sentence) from error


class LightningMonitor(Callback):
    """A `Monitor` for as long as `fit` trains; `monitor` is None before.

    Args:
        part: The name of the submodule that is measured and called with the probe; by default the
            `LightningModule` itself.
        *positional: The metrics, if they are not among the options.
        **options: What `Monitor` takes, but for the model and the step. By default `optimizer` is the trainer's first.

    Raises:
        MonitorError: `part` is no text, or `Monitor` has no such option.

    >>> LightningMonitor(part="model", every=100, run="runs/mine").part
    'model'
    """

    def __init__(self, *positional: object, part: str = "", **options: Any) -> None:
        if not isinstance(part, str):
            raise MonitorError(f"part must be the name of a submodule; got a {type(part).__name__}", subject="part")
        self.part, self.options = part, named_options("LightningMonitor", positional, options)
        self.monitor: Monitor | None = None
        self._state: Mapping[str, Any] = {}
        self._losses: list[Tensor] = []
        self._lr: float | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin, or continue from the checkpoint that was loaded."""
        self.close()
        try:
            model = pl_module.get_submodule(self.part)
        except AttributeError as error:
            sentence = f"part must name a submodule of {type(pl_module).__name__}; got {self.part!r}: {error}"
            raise MonitorError(sentence, subject="part") from error
        options = {"optimizer": torch_optimizer(next(iter(trainer.optimizers), None)), **self.options}
        if options.get("probe") is not None:
            options["probe"] = trainer.precision_plugin.convert_input(options["probe"])
        with trainer.precision_plugin.forward_context():
            self.monitor = Monitor(model, step=_steps(trainer), **options)
            if self._state and self._state["step"] == _steps(trainer):
                self.monitor.load_state_dict(self._state)
        self._state = {}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        """Note the learning rate that the step is made with: schedulers change it before the batch ends."""
        self._lr = float(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        """Note the loss of a batch; if the optimiser has made a step, call `Monitor.step`."""
        monitor = self.monitor
        if monitor is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            # Lightning divides the loss of a batch by the number of batches that are accumulated.
            self._losses.append(loss.detach() * trainer.accumulate_grad_batches)
        if _steps(trainer) == monitor.steps:
            return
        mean = torch.stack(self._losses).mean() if self._losses else None
        self._losses = []
        with trainer.precision_plugin.forward_context():
            monitor.step(_steps(trainer), loss=mean, lr=self._lr)
        trainer.callback_metrics.update({name: torch.tensor(x) for name, x in last_numbers(monitor).items()})
        if monitor.should_stop:
            trainer.should_stop = True

    def on_train_end(self, *_: Any) -> None:
        """Close the monitor when the training has ended."""
        self.close()

    def on_exception(self, *_: Any) -> None:
        """Close the monitor when the training has raised."""
        self.close()

    def close(self) -> None:
        """Close the monitor, if there is one."""
        if self.monitor is not None:
            self.monitor.close()
        self._losses = []

    def state_dict(self) -> dict[str, Any]:
        """The monitor's state, which Lightning puts into each checkpoint."""
        return {} if self.monitor is None else self.monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a checkpoint's state until training starts and there is a monitor."""
        self._state = state_dict


def _steps(trainer: Any) -> int:
    """The steps made so far, of each optimiser."""
    return int(trainer.global_step) // max(1, len(trainer.optimizers))

"""In a Lightning `Trainer`:

    from rankscope.live.loops.lightning import MonitorCallback
    trainer = Trainer(callbacks=[MonitorCallback(probe=batch, every=100, run="runs/mine")])

- Steps are `trainer.global_step`: one for each step of the optimiser, however many batches it accumulates. It
  counts those of several optimisers together: then steps are their share.
- The loss is what `training_step` returns, the mean over accumulated batches; the learning rate is that of
  the first parameters of the first optimiser, as the step was made with it. Gradients are its own too.
- The probe is given to the `LightningModule` itself, or to a part of it (`part="model"`), under the
  precision of the strategy: autocast where training is autocast.
- `trainer.fit(..., ckpt_path=...)` goes on in the same folder; what was written of later steps is taken away.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rankscope.errors import MissingExtraError
from rankscope.live.monitor import Monitor
from rankscope.live.monitor.gradients import plain

if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        try:
            from pytorch_lightning import Callback
        except ImportError as error:
            raise MissingExtraError(
                "this callback is for Lightning, which is not installed: pip install 'rankscope[lightning]'"
            ) from error


class MonitorCallback(Callback):
    """A monitor for as long as `fit` trains; `options` are those of `Monitor`, less the model.

    `part` names what is watched and called with the probe, where that is not the `LightningModule` itself.
    """

    def __init__(self, *, part: str = "", **options: Any) -> None:
        self.part, self.options = part, options
        self.monitor: Monitor | None = None
        """There from the beginning of the training on."""
        self._state: Mapping[str, Any] = {}
        self._losses: list[Tensor] = []
        self._lr: float | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin, or go on where the checkpoint stands."""
        self.close()
        options = {"optimizer": plain(next(iter(trainer.optimizers), None)), **self.options}
        if options.get("probe") is not None:
            options["probe"] = trainer.precision_plugin.convert_input(options["probe"])
        with _precision(trainer):
            self.monitor = Monitor(pl_module.get_submodule(self.part), step=_made(trainer), **options)
            if self._state and self._state["step"] == _made(trainer):
                self.monitor.load_state_dict(self._state)
        self._state = {}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        """The learning rate that the step is made with: schedulers move it before the batch ends."""
        self._lr = float(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """One batch; with it, or some batches later, the optimiser has made a step."""
        monitor = self.monitor
        if monitor is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            # Lightning divides the loss of a batch by the number that is accumulated.
            self._losses.append(loss.detach() * trainer.accumulate_grad_batches)
        if _made(trainer) == monitor.steps:
            return
        mean = torch.stack(self._losses).mean() if self._losses else None
        self._losses = []
        with _precision(trainer):
            monitor.step(_made(trainer), loss=mean, lr=self._lr)
        if monitor.should_stop:
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Let the model and the folder go."""
        self.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Let the model and the folder go."""
        self.close()

    def close(self) -> None:
        """Let the model and the folder go."""
        if self.monitor is not None:
            self.monitor.close()
        self._losses = []

    def state_dict(self) -> dict[str, Any]:
        """Part of each checkpoint."""
        return {} if self.monitor is None else self.monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Kept until there is a model."""
        self._state = state_dict


def _made(trainer: Any) -> int:
    """Steps so far, of each of its optimisers."""
    return int(trainer.global_step) // max(1, len(trainer.optimizers))


def _precision(trainer: Any) -> AbstractContextManager[None]:
    return trainer.precision_plugin.forward_context()

"""`Probe`: a fixed batch with which the model is called again at every measurement of a training.

`Monitor` makes one from its argument `probe` and calls `measure`, which calls the model inside
`preserved_training_state`, under a `Watch` that reads each layer and, if there is a loss, inside
`TokenGradients`. The result is values by layer and metric, which `Monitor` reduces.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.errors import MonitorError, RankscopeError
from rankscope.live.monitor import distributed
from rankscope.live.monitor.running_sums import MetricValues
from rankscope.live.monitor.token_gradients import LossFunction, TokenGradients, loss_in
from rankscope.live.monitor.training_state import preserved_training_state
from rankscope.live.plan import WatchPlan
from rankscope.live.watch import Watch
from rankscope.sources.checkpoint import first_line


@dataclass(frozen=True)
class Probe:
    """The arguments that the model is called with: copies, so that the loop may change its batch."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: LossFunction | None = None
    """The loss to differentiate; None: the output's own."""
    notes: list[str] = field(default_factory=list)
    """Why gradients are no longer measured, once that has failed."""

    @classmethod
    def of(cls, batch: object, loss: LossFunction | None = None) -> "Probe":
        """A probe from a tensor, a dictionary of the model's arguments, or a tuple or list of them."""
        if isinstance(batch, Tensor):
            probe = cls((_copied(batch),), {}, loss)
        elif isinstance(batch, Mapping):
            probe = cls((), {str(name): _copied(value) for name, value in batch.items()}, loss)
        elif isinstance(batch, tuple | list):
            probe = cls(tuple(map(_copied, batch)), {}, loss)
        else:
            raise MonitorError(
                "a probe must be a tensor, a dictionary of the model's arguments, or a tuple of them; "
                f"received a {type(batch).__name__}: give one batch, as next(iter(loader)) has it",
                subject="probe",
            )
        if not any(isinstance(value, Tensor) for value in (*probe.args, *probe.kwargs.values())):
            raise MonitorError(
                "a probe must hold a tensor that the model takes; received none", subject="probe"
            )
        return probe

    @property
    def has_loss(self) -> bool:
        """True if there is something to differentiate: a loss, or labels of which the model makes one."""
        labelled = any(name.endswith("labels") and value is not None for name, value in self.kwargs.items())
        return not self.notes and (self.loss is not None or labelled)

    def measure(self, model: nn.Module, plan: WatchPlan) -> MetricValues:
        """Call the model with the probe, and return what was read of it; the training does not notice.

        If gradients cannot be computed on some rank, for want of memory for example, all ranks leave them out
        from then on.
        """
        if self.has_loss:
            values, failure = MetricValues(), None
            try:
                values = self._measure(model, plan, TokenGradients(plan))
            except RankscopeError:
                raise
            except RuntimeError as error:  # too little memory, or code that has no gradient
                failure = first_line(error)
            why = next((reason for reason in distributed.gathered(failure) if reason is not None), None)
            if why is None:
                return values
            self.notes.append(f"gradients at the probe's tokens are not measured: {why}")
        return self._measure(model, plan, None)

    def _measure(self, model: nn.Module, plan: WatchPlan, gradients: TokenGradients | None) -> MetricValues:
        device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
        args = [_moved(value, device) for value in self.args]
        kwargs = {name: _moved(value, device) for name, value in self.kwargs.items()}
        gradient_values = MetricValues()
        with preserved_training_state(model), torch.set_grad_enabled(gradients is not None):
            with Watch(model, plan) as watch, gradients or nullcontext():
                output = model(*args, **kwargs)
            if gradients is not None and (loss := loss_in(output, self.loss)) is not None:
                gradient_values = gradients.values(loss)
        values = MetricValues()
        for layer, readings in watch.readings:
            values.add_readings(layer, readings)
        if not values:
            watch.profile()  # raises, and says why nothing was read
        values.update(gradient_values)
        return values


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value

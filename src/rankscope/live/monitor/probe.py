"""The probe: a fixed batch that is looked at again and again while the model learns."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.errors import MonitorError, RankscopeError
from rankscope.live.call import Plan
from rankscope.live.monitor import ranks
from rankscope.live.monitor.backward import Backward, Loss, loss_in
from rankscope.live.monitor.tally import Tallied
from rankscope.live.monitor.untouched import untouched
from rankscope.live.watch import Watch
from rankscope.sources.checkpoint import first_line


@dataclass(frozen=True)
class Probe:
    """What the model is called with: a copy, so that what the loop does to its batch does not matter."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Loss | None = None
    """Whose gradients are taken; left out, the output's own."""
    notes: list[str] = field(default_factory=list)
    """Why gradients are not taken, once that has failed."""

    @classmethod
    def of(cls, given: object, loss: Loss | None = None) -> "Probe":
        """A tensor, a dictionary of the model's arguments, or a tuple or list of them."""
        if isinstance(given, Tensor):
            found = cls((_copied(given),), {}, loss)
        elif isinstance(given, Mapping):
            found = cls((), {str(name): _copied(each) for name, each in given.items()}, loss)
        elif isinstance(given, tuple | list):
            found = cls(tuple(_copied(each) for each in given), {}, loss)
        else:
            raise MonitorError(
                "a probe must be a tensor, a dictionary of the model's arguments, or a tuple of them; "
                f"received a {type(given).__name__}: give one batch, as next(iter(loader)) has it"
            )
        if not any(isinstance(each, Tensor) for each in (*found.args, *found.kwargs.values())):
            raise MonitorError("a probe must hold a tensor that the model takes; received none")
        return found

    def look(self, model: nn.Module, plan: Plan, blocks: list[nn.Module]) -> Tallied:
        """What the model makes of it now, reduced to tallies; the training does not notice. Where gradients
        cannot be taken on some rank, as for want of memory, they are left out from then on, on all."""
        if self.learns:
            found, failed = Tallied(), None
            try:
                found = self._seen(model, plan, blocks, back=Backward(plan, blocks))
            except RankscopeError:
                raise
            except RuntimeError as error:  # too little memory, code that has no gradient
                failed = first_line(error)
            why = next((each for each in ranks.each(failed) if each is not None), None)
            if why is None:
                return found
            self.notes.append(f"gradients at the probe's tokens are not measured: {why}")
        return self._seen(model, plan, blocks, back=None)

    def _seen(self, model: nn.Module, plan: Plan, blocks: list[nn.Module], back: Backward | None) -> Tallied:
        device = next((each.device for each in model.parameters()), torch.device("cpu"))
        args = [_moved(each, device) for each in self.args]
        kwargs = {name: _moved(each, device) for name, each in self.kwargs.items()}
        gradients = Tallied()
        with untouched(model), torch.set_grad_enabled(back is not None):
            with Watch(model, plan, blocks, "as given") as seen, back or nullcontext():
                output = model(*args, **kwargs)
            if back is not None and (loss := loss_in(output, self.loss)) is not None:
                gradients = back.taken(loss)
        found = Tallied()
        for each in seen.readings:
            found.read(*each)
        if not found:
            seen.profile()  # which says why there is none
        found.update(gradients)
        return found

    @property
    def learns(self) -> bool:
        """Whether there is something to differentiate: a loss, or labels of which the model makes one."""
        labelled = any(name.endswith("labels") and each is not None for name, each in self.kwargs.items())
        return not self.notes and (self.loss is not None or labelled)


def _copied(given: Any) -> Any:
    return given.detach().clone() if isinstance(given, Tensor) else given


def _moved(given: Any, device: torch.device) -> Any:
    return given.to(device) if isinstance(given, Tensor) else given

"""The probe: a fixed batch that is looked at again and again while the model learns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.errors import MonitorError
from rankscope.live.call import Plan
from rankscope.live.monitor.tally import Tallied, tally
from rankscope.live.monitor.untouched import untouched
from rankscope.live.watch import Watch


@dataclass(frozen=True)
class Probe:
    """What the model is called with: a copy, so that what the loop does to its batch does not matter."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, given: object) -> "Probe":
        """A tensor, a dictionary of the model's arguments, or a tuple or list of them."""
        if isinstance(given, Tensor):
            found = cls((_copied(given),), {})
        elif isinstance(given, Mapping):
            found = cls((), {str(name): _copied(each) for name, each in given.items()})
        elif isinstance(given, tuple | list):
            found = cls(tuple(_copied(each) for each in given), {})
        else:
            raise MonitorError(
                "a probe must be a tensor, a dictionary of the model's arguments, or a tuple of them; "
                f"received a {type(given).__name__}: give one batch, as next(iter(loader)) has it"
            )
        if not any(isinstance(each, Tensor) for each in (*found.args, *found.kwargs.values())):
            raise MonitorError("a probe must hold a tensor that the model takes; received none")
        return found

    def look(self, model: nn.Module, plan: Plan, blocks: list[nn.Module]) -> Tallied:
        """What the model makes of it now, reduced to tallies; the training does not notice."""
        device = next((each.device for each in model.parameters()), torch.device("cpu"))
        args = [_moved(each, device) for each in self.args]
        kwargs = {name: _moved(each, device) for name, each in self.kwargs.items()}
        with untouched(model), Watch(model, plan, blocks, "as given", eager=True) as seen:
            model(*args, **kwargs)
        found = Tallied()
        for layer, readings in seen.readings:
            for metric, reading in readings:
                found.add(layer, metric.name, tally(reading))
        if not found:
            seen.profile()  # which says why there is none
        return found


def _copied(given: Any) -> Any:
    return given.detach().clone() if isinstance(given, Tensor) else given


def _moved(given: Any, device: torch.device) -> Any:
    return given.to(device) if isinstance(given, Tensor) else given

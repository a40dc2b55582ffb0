"""Measures the gradients of a block's weights, and how far a step of the optimiser moves them.

Of the weights W of a parameter group (`parameter_groups.py`), at a step that is measured:

    grad_GROUP   = ||G||_F,  G the gradient as the optimiser uses it (after clipping, if the loop clips)
    update_GROUP = ||W_after - W_before||_F / ||W_before||_F

`Monitor` calls `record(True)` before a step that may be measured. Hooks around `optimizer.step()` then copy
the weights and take sums of squares, which stay on their device; after the step `Monitor` calls `values()`.
If the optimiser makes several steps in between, the last one counts. Neither weights nor gradients are
written to.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.errors import MonitorError
from rankscope.live.monitor import distributed
from rankscope.live.monitor.parameter_groups import ParameterSlice, parameter_groups
from rankscope.live.monitor.running_sums import MetricValues

NO_VALUE = torch.zeros(0, dtype=torch.float64)
"""The values of a step that was not made, and of ranks that do not write."""
SliceKey = tuple[int, str]
"""A module by its id, and the name of a weight in it."""


class WeightGradients:
    """Records gradients and updates by hooks of an optimiser, while `recording` is True."""

    def __init__(self, optimizer: Any, blocks: list[nn.Module]) -> None:
        inner = torch_optimizer(optimizer)
        if inner is None:
            raise MonitorError(
                f"optimizer must be a torch optimiser; received a {type(optimizer).__name__}: give the one "
                "whose step() the loop calls",
                subject="optimizer",
            )
        self.optimizer, self.recording = inner, False
        self.groups, left_out = parameter_groups(blocks)
        self.notes = [_left_out_note(left_out)] if left_out else []
        if not self.groups:
            self.notes.append(
                "gradients of weights are not measured: no block has weights whose names say whether they "
                "are of queries, keys, values, outputs or the MLP"
            )
        self._slices = {_key(part): part for parts in self.groups.values() for part in parts}
        self._before: dict[SliceKey, Tensor] = {}
        self._squares: dict[str, dict[SliceKey, Tensor]] = {}
        """Of gradients, of weights and of updates: for each weight, a sum of squares for each output."""
        self._rate: Any = None
        self._scale: float | Tensor = 1.0
        self._skipped: bool | Tensor = False
        self._hooks = [
            inner.register_step_pre_hook(self._before_step),
            inner.register_step_post_hook(self._after_step),
        ]

    def record(self, on: bool) -> None:
        """Drop what was recorded, and record the next step or not."""
        self.recording, self._squares, self._rate = on, {}, None

    @torch.no_grad()
    def values(self, rate: bool) -> MetricValues:
        """The numbers of the last recorded step, and its learning rate if `rate`; nothing if none was
        recorded. Every rank has the same rows, without numbers if a scaler skipped the step."""
        values = MetricValues()
        if not self.recording:
            return values
        made = "update" in self._squares and not self._skipped
        for (layer, group), parts in self.groups.items():
            norm = {name: _norm(parts, squares) for name, squares in self._squares.items()}
            gradient = _counted_once(norm["gradient"] / self._scale) if made else NO_VALUE
            update = _counted_once(norm["update"] / norm["weight"]) if made else NO_VALUE
            values.add(layer, f"grad_{group}", gradient)
            values.add(layer, f"update_{group}", update)
        if rate:
            last = self.optimizer.param_groups[0]["lr"] if self._rate is None else self._rate
            values.add(None, "lr", _counted_once(torch.as_tensor(last, dtype=torch.float64)))
        self.record(False)
        return values

    def close(self) -> None:
        """Remove the hooks from the optimiser."""
        for hook in self._hooks:
            hook.remove()
        self._before = {}

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Copy the weights, and take the gradients. A closure, as Lightning passes one, computes gradients
        inside the step: then they are taken after it. `args` has the optimiser first."""
        if not self.recording:
            return None
        rate = optimizer.param_groups[0]["lr"]
        self._rate = rate.clone() if isinstance(rate, Tensor) else rate
        self._before = {key: part.weight.detach().clone() for key, part in self._slices.items()}
        self._squares = {"weight": self._sums(self._before)}
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._take_gradients()
            return None

        def closure_then_gradients() -> Any:
            loss = closure()
            self._take_gradients()
            return loss

        if len(args) > 1:
            return (args[0], closure_then_gradients, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_then_gradients}

    @torch.no_grad()
    def _take_gradients(self) -> None:
        """Take the gradients as they are now. A fused optimiser divides them by a scaler's scale itself, and
        skips the step if they are infinite."""
        gradients = {key: part.weight.grad for key, part in self._slices.items()}
        self._squares["gradient"] = self._sums(gradients)
        scale = getattr(self.optimizer, "grad_scale", None)
        self._scale = 1.0 if scale is None else scale.double().clone()
        infinite = getattr(self.optimizer, "found_inf", None)
        self._skipped = False if infinite is None else infinite.clone()

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._before:
            updates = {key: self._slices[key].weight - before for key, before in self._before.items()}
            self._squares["update"] = self._sums(updates)
            self._before = {}

    def _sums(self, tensors: Mapping[SliceKey, Tensor | None]) -> dict[SliceKey, Tensor]:
        """The sum of squares at each output; a weight without gradient has none."""
        return {
            key: _sums_of_squares(tensor, self._slices[key].axis)
            for key, tensor in tensors.items()
            if tensor is not None
        }


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """The torch optimiser that Accelerate may have wrapped; None for any other kind, such as DeepSpeed's."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, torch.optim.Optimizer) else None


def _key(part: ParameterSlice) -> SliceKey:
    return id(part.owner), part.name


def _sums_of_squares(tensor: Tensor, axis: int) -> Tensor:
    dims = [k for k in range(tensor.ndim) if k != axis]
    return torch.linalg.vector_norm(tensor, dim=dims, dtype=torch.float64).square()


def _norm(parts: list[ParameterSlice], squares: dict[SliceKey, Tensor]) -> Tensor:
    """The Frobenius norm of these slices together."""
    sums = []
    for part in parts:
        if (by_output := squares.get(_key(part))) is not None:
            by_output = distributed.full_tensor(by_output)
            sums.append((by_output if part.choose is None else part.choose(by_output)).sum())
    if not sums:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack([total.to(sums[0].device) for total in sums]).sum().sqrt()


def _counted_once(value: Tensor) -> Tensor:
    """A value that all ranks have, as a sample of the rank that writes only."""
    return value[None] if distributed.is_writer() else NO_VALUE


def _left_out_note(names: list[str]) -> str:
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"gradients of weights: {shown} of a block belong to no known group, and are left out"

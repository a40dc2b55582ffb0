"""Gradients of a block's weights, and how far a step of the optimiser moves them.

Of the weights W of a group (`parts.py`), at a step that is looked at:

    grad_...   = ||G||_F,  G the gradient as the optimiser takes it (clipped, where the loop clips)
    update_... = ||W_after - W_before||_F / ||W_before||_F

Both are taken by hooks around `optimizer.step()`: copies of the weights are made at those steps alone, the
sums stay on their device until the look, and neither weights nor gradients are written to.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.errors import MonitorError
from rankscope.live.monitor import ranks
from rankscope.live.monitor.parts import Part, parts_of
from rankscope.live.monitor.tally import Tallied

NONE = torch.zeros(0, dtype=torch.float64)
"""Of a step that was not made, and of ranks that do not write."""
Where = tuple[int, str]
"""A module by its id, and the name of a weight in it."""


class Gradients:
    """What is seen of an optimiser's steps."""

    def __init__(self, optimizer: Any, blocks: list[nn.Module]) -> None:
        inner = plain(optimizer)
        if inner is None:
            raise MonitorError(
                f"optimizer must be a torch optimiser; received a {type(optimizer).__name__}: give the one "
                "whose step() the loop calls"
            )
        self.optimizer, self.on = inner, False
        """`on`: whether the step that is being made counts."""
        self.parts, left_out = parts_of(blocks)
        self.notes = [_left_out(left_out)] if left_out else []
        if not self.parts:
            self.notes.append(
                "gradients of weights are not measured: no block has weights with names that say whose they "
                "are"
            )
        self._each = {_where(part): part for found in self.parts.values() for part in found}
        self._before: dict[Where, Tensor] = {}
        self._squares: dict[str, dict[Where, Tensor]] = {}
        """Of gradients, of weights and of what was added to them: a sum of squares for each output."""
        self._rate: Any = None
        self._scale: float | Tensor = 1.0
        self._skipped: bool | Tensor = False
        self._hooks = [inner.register_step_pre_hook(self._begins), inner.register_step_post_hook(self._ends)]

    @torch.no_grad()
    def taken(self, rate: bool) -> Tallied:
        """The numbers of the step that was seen (and its learning rate): a row for every group, so that all
        ranks have the same, without a number where a scaler found infinite gradients and skipped the step."""
        found = Tallied()
        if not self.on:
            return found
        made = "moved" in self._squares and not self._skipped
        for (layer, group), parts in self.parts.items():
            of = {what: _size(parts, squares) for what, squares in self._squares.items()}
            found.add(layer, f"grad_{group}", _one(of["gradient"] / self._scale) if made else NONE)
            found.add(layer, f"update_{group}", _one(of["moved"] / of["weight"]) if made else NONE)
        if rate:
            last = self.optimizer.param_groups[0]["lr"] if self._rate is None else self._rate
            found.add(None, "lr", _one(torch.as_tensor(last, dtype=torch.float64)))
        self._squares, self._rate, self.on = {}, None, False
        return found

    def close(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._before = {}

    @torch.no_grad()
    def _begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """`args` has the optimiser first. A closure, as Lightning gives one, makes the gradients inside
        the step: they are taken after it."""
        if not self.on:
            return None
        rate = optimizer.param_groups[0]["lr"]
        self._rate = rate.clone() if isinstance(rate, Tensor) else rate
        self._before = {where: part.weight.detach().clone() for where, part in self._each.items()}
        self._squares = {"weight": self._sums(self._before)}
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._take()
            return None

        def closed() -> Any:
            loss = closure()
            self._take()
            return loss

        return (
            ((args[0], closed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closed})
        )

    @torch.no_grad()
    def _take(self) -> None:
        """The gradients as they are now; a fused optimiser is left to divide them by a scaler's scale, and to
        skip the step where they are infinite."""
        self._squares["gradient"] = self._sums({name: part.weight.grad for name, part in self._each.items()})
        scale = getattr(self.optimizer, "grad_scale", None)
        self._scale = 1.0 if scale is None else scale.double().clone()
        infinite = getattr(self.optimizer, "found_inf", None)
        self._skipped = False if infinite is None else infinite.clone()

    @torch.no_grad()
    def _ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._before:
            moved = {where: self._each[where].weight - each for where, each in self._before.items()}
            self._squares["moved"] = self._sums(moved)
            self._before = {}

    def _sums(self, tensors: Mapping[Where, Tensor | None]) -> dict[Where, Tensor]:
        """The sum of squares at each output; a weight without gradient has none."""
        return {
            where: _squares(each, self._each[where].axis)
            for where, each in tensors.items()
            if each is not None
        }


def plain(optimizer: Any) -> torch.optim.Optimizer | None:
    """torch's own, which Accelerate wraps; none where it is of another kind, as DeepSpeed's is."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, torch.optim.Optimizer) else None


def _where(part: Part) -> Where:
    return id(part.owner), part.name


def _squares(tensor: Tensor, axis: int) -> Tensor:
    others = [k for k in range(tensor.ndim) if k != axis]
    return torch.linalg.vector_norm(tensor, dim=others, dtype=torch.float64).square()


def _size(parts: list[Part], squares: dict[Where, Tensor]) -> Tensor:
    """The Frobenius norm of these parts together."""
    sums = []
    for part in parts:
        if (found := squares.get(_where(part))) is not None:
            each = ranks.whole(found)
            sums.append((each if part.cut is None else part.cut(each)).sum())
    if not sums:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack([each.to(sums[0].device) for each in sums]).sum().sqrt()


def _one(value: Tensor) -> Tensor:
    """Counted once, by the rank that writes: all have the same."""
    return value[None] if ranks.writes() else NONE


def _left_out(names: list[str]) -> str:
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"gradients of weights: it is not known whose {shown} of a block is; left out"

"""Finds the output projection of attention where an observer knows the heads' outputs alone.

Nobody says which module it is: `o_proj`, `c_proj`, `dense`, `out_lin` ... It is the first Linear or Conv1D in
the block that is called, after attention, on exactly the heads' outputs side by side. That what the heads add
sums to the projection's own output is checked every time.

Order of events: `Watch` enters `attached`; the recorder calls `reset` when a call of the model begins;
`attention_readings.py` sets `head_outputs` when attention was seen; a hook calls `linear_called`, which hands
what each head adds to `on_contributions`; where the projection lies inside a module with further weights
(LoRA), a hook calls `wrapper_called`; `block_left` checks that the projection was found.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.errors import WatchError
from rankscope.live.attention.head_outputs import CLOSURE, check_contributions, contributions_of, weight_of
from rankscope.live.isolation import isolated

Called = Callable[[nn.Module, Tensor, Tensor], None]
"""Takes a module, its input and its output."""


class OutputProjectionFinder:
    """Waits for the linear layer that is called on the heads' outputs, and reports what each head adds."""

    def __init__(self, on_contributions: Callable[[Tensor], None]) -> None:
        self.on_contributions = on_contributions
        self.reset()

    def reset(self) -> None:
        """Forget what a call of the model left behind."""
        self.head_outputs: Tensor | None = None  # waiting for the projection, `[batch, token, head, d]`
        self.projected: tuple[nn.Module, Tensor, Tensor] | None = None
        """The projection found in this block, its input and its output."""

    def linear_called(self, linear: nn.Module, x: Tensor, y: Tensor) -> None:
        """A linear layer in a block computed y from x: the projection, if x is the heads' outputs."""
        heads = self.head_outputs
        if heads is None or x.numel() != heads.numel() or x.shape[-1] != heads.shape[-2] * heads.shape[-1]:
            return
        with isolated(x.device):
            expected = heads.flatten(-2).reshape(x.shape).to(x.dtype)
            if not bool(torch.isclose(x, expected, equal_nan=True).all()):
                return
            self.head_outputs = None
            contributions = contributions_of(heads, weight_of(linear))
            check_contributions(contributions, linear.bias, y, type(linear).__name__)  # type: ignore[arg-type]
            self.on_contributions(contributions)
            self.projected = (linear, x, y.clone())  # a wrapper may add to y in place

    def wrapper_called(self, module: nn.Module, x: Tensor, y: Tensor) -> None:
        """A module around linear layers computed y from x: around the projection, both outputs must agree."""
        if self.projected is None:
            return
        projection, taken, output = self.projected
        if x.shape != taken.shape or projection not in set(module.modules()):
            return
        with isolated(x.device):
            same = y.shape == output.shape and torch.allclose(y.to(output), output, CLOSURE, 1e-12, True)
            if torch.equal(x, taken) and not same:
                raise WatchError(
                    f"what each head adds needs a plain output projection; {type(module).__name__} adds to "
                    f"what a {type(projection).__name__} in it returns, as LoRA does: merge it into the "
                    "weights, or watch metrics of tokens or attention",
                    subject="heads",
                )

    def block_left(self, block: nn.Module) -> None:
        """The block has returned: its output projection must have been found by now."""
        self.projected = None
        if self.head_outputs is not None:
            raise WatchError(
                "what each head adds needs the output projection; no Linear or Conv1D of "
                f"{type(block).__name__} was called on the heads' outputs as they are: watch metrics of "
                "tokens or attention",
                subject="heads",
            )

    @contextmanager
    def attached(self, blocks: Sequence[nn.Module]) -> Iterator[None]:
        """Inside, linear layers in the blocks, and modules with weights around them, are hooked."""
        modules = dict.fromkeys(part for block in blocks for part in block.modules() if part is not block)
        with ExitStack() as hooks:
            for module in modules:
                if _is_linear(module):
                    hooks.callback(module.register_forward_hook(_reporting(self.linear_called)).remove)
                elif _wraps_linear(module):
                    hooks.callback(module.register_forward_hook(_reporting(self.wrapper_called)).remove)
            yield


def _reporting(called: Called) -> Callable[[nn.Module, Any, Any], None]:
    """A forward hook that reports a module's input and output, where it maps one tensor to one tensor."""

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        # With a second argument it is more than a projection: BERT's also takes the residual.
        if len(args) == 1 and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            called(module, args[0].detach(), output.detach())

    return hook


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _wraps_linear(module: nn.Module) -> bool:
    """True if there are linear layers in a module and parameters beside those of one of them and of norms."""
    inside = list(module.modules())
    weighted = [
        part
        for part in inside
        if "norm" not in type(part).__name__.lower()
        and next(part.parameters(recurse=False), None) is not None
    ]
    return any(map(_is_linear, inside)) and len(weighted) > 1

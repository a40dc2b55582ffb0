"""Gradients at each layer's tokens of a probe: of a loss of its own, which leaves no trace.

They are taken with respect to the tokens alone (`torch.autograd.grad`): no gradient of a weight is computed,
accumulated or reduced, so that nothing that waits for one (an optimiser, DDP, a hook) hears of it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rankscope.errors import MonitorError
from rankscope.live.call import Plan
from rankscope.live.monitor.inline import GRADIENT
from rankscope.live.monitor.tally import Tallied
from rankscope.live.spans import is_span
from rankscope.live.states import states_in

Loss = Callable[[Any], Tensor]
"""Of what the model gives back, a single number."""


class Backward:
    """Notes where each layer's tokens lie in the graph while the model is called; then goes back to them."""

    def __init__(self, plan: Plan, blocks: Sequence[nn.Module]) -> None:
        self.plan = plan
        self.places = {id(block): place for place, block in reversed(list(enumerate(blocks, 1)))}
        self.blocks = list(dict.fromkeys(blocks))
        self.layer, self.shape = 0, None  # type: tuple[int, torch.Size | None]
        self.edges: dict[int, list[tuple[Tensor, GradientEdge]]] = {}
        """By layer, what could be its tokens: where there are several, the next block says which."""
        self._stack = ExitStack()

    def __enter__(self) -> "Backward":
        if any(map(is_span, self.blocks)):
            raise RuntimeError("its layers are lists of parts, and are not called themselves")
        for block in self.blocks:
            self._stack.callback(block.register_forward_pre_hook(self._enters, with_kwargs=True).remove)
            self._stack.callback(block.register_forward_hook(self._leaves).remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def taken(self, loss: Tensor) -> Tallied:
        """The size at each layer's tokens, as `GRADIENT` says it."""
        found = Tallied()
        edges = {
            layer: each[0][1]
            for layer, each in sorted(self.edges.items())
            if len(each) == 1 and self.plan.measures(layer)
        }
        self.edges = {}
        if not edges:
            return found
        grads = torch.autograd.grad(loss, list(edges.values()), allow_unused=True)
        for layer, grad in zip(edges, grads, strict=True):
            if grad is not None:
                state = states_in(grad, self.plan.layout, "a gradient", self.plan.grid)[0]
                size = torch.linalg.vector_norm(state.double(), dim=(1, 2)) * len(state)
                found.add(layer, GRADIENT, size)
        return found

    def _enters(self, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        given = (kwargs["hidden_states"],) if "hidden_states" in kwargs else (*args, *kwargs.values())
        if not self.layer:
            states = [x for x in _like_tokens(given) if x.ndim == 3] or _like_tokens(given)
            self.shape = states[0].shape if states else None
            self.edges[0] = self._edges(states[:1])
        elif len(self.edges[self.layer]) > 1:
            taken = {id(each) for each in given}
            self.edges[self.layer] = [each for each in self.edges[self.layer] if id(each[0]) in taken]
        self.layer = max(self.layer + 1, self.places[id(block)])

    def _leaves(self, block: nn.Module, args: Any, output: Any) -> None:
        self.edges[self.layer] = self._edges(_like_tokens(output))

    def _edges(self, states: Sequence[Tensor]) -> list[tuple[Tensor, GradientEdge]]:
        """An edge stays where it is when a later block writes into the tensor."""
        fitting = [x for x in states if x.shape == self.shape]
        return [(x, get_gradient_edge(x)) for x in fitting if x.requires_grad]


def loss_in(output: Any, loss: Loss | None) -> Tensor | None:
    """What is differentiated: the function's answer, or the output's own `loss`."""
    if loss is None:
        found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        return found if isinstance(found, Tensor) and found.requires_grad else None
    found = loss(output)
    if not isinstance(found, Tensor) or found.numel() != 1 or not found.requires_grad:
        came = f"a tensor {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        cut = " that no weight has a part in" if isinstance(found, Tensor) and found.numel() == 1 else ""
        raise MonitorError(
            "loss must be a function of what the model gives back that returns a tensor of one number, to be "
            f"differentiated; it returned {came}{cut}"
        )
    return found


def _like_tokens(found: Any) -> list[Tensor]:
    """The floating tensors in what a block takes or gives."""
    parts = found.values() if isinstance(found, Mapping) else found
    several = parts if isinstance(parts, Iterable) and not isinstance(parts, Tensor) else [parts]
    return [x for x in several if isinstance(x, Tensor) and x.is_floating_point()]

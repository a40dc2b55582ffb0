"""Gradients of a loss at each layer's tokens.

    grad_tokens = B ||dL/dX||_F   of each sample, B the number of samples

Where the loss is a mean over samples, that is the gradient of each sample's own loss. `probe.py` enters a
`TokenGradients` while it calls the model with the probe: hooks of the blocks note where each layer's tokens
lie in autograd's graph, and `values(loss)` differentiates with respect to the tokens alone
(`torch.autograd.grad`). No gradient of a weight is computed, accumulated or reduced, so nothing that waits
for one (an optimiser, DDP, a hook) notices. `inline.py` measures the same number of training batches.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rankscope.errors import MonitorError
from rankscope.live.block_hooks import is_list_of_parts
from rankscope.live.hidden_states import hidden_states_in
from rankscope.live.monitor.running_sums import MetricValues
from rankscope.live.plan import WatchPlan

METRIC = "grad_tokens"
LossFunction = Callable[[Any], Tensor]
"""Takes what the model returns, and gives a tensor of one number."""


def gradient_norms(plan: WatchPlan, gradient: Tensor) -> Tensor:
    """`grad_tokens` of each sample, from the gradient at the tokens of all of them."""
    gradient = hidden_states_in(gradient, plan.layout, "a gradient", plan.grid)[0]
    return torch.linalg.vector_norm(gradient.double(), dim=(1, 2)) * len(gradient)


class TokenGradients:
    """Notes the place of each layer's tokens in the graph while the model is called, and differentiates."""

    def __init__(self, plan: WatchPlan) -> None:
        self.plan = plan
        self.first_layers = {id(block): layer for layer, block in reversed(list(enumerate(plan.blocks, 1)))}
        self.blocks = list(dict.fromkeys(plan.blocks))
        self.layer, self.shape = 0, None  # type: tuple[int, torch.Size | None]
        self.edges: dict[int, list[tuple[Tensor, GradientEdge]]] = {}
        """The tensors of each layer that could be its tokens: of several, the next block takes the right
        one."""
        self._stack = ExitStack()

    def __enter__(self) -> "TokenGradients":
        if any(map(is_list_of_parts, self.blocks)):
            raise RuntimeError("its layers are lists of parts, and are not called themselves")
        for block in self.blocks:
            self._stack.callback(block.register_forward_pre_hook(self._on_input, with_kwargs=True).remove)
            self._stack.callback(block.register_forward_hook(self._on_output).remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def values(self, loss: Tensor) -> MetricValues:
        """`grad_tokens` of every layer that is measured and whose tokens are known."""
        edges = {
            layer: candidates[0][1]
            for layer, candidates in sorted(self.edges.items())
            if len(candidates) == 1 and self.plan.measures(layer)
        }
        self.edges = {}
        values = MetricValues()
        gradients = torch.autograd.grad(loss, list(edges.values()), allow_unused=True) if edges else ()
        for layer, gradient in zip(edges, gradients, strict=True):
            if gradient is not None:
                values.add(layer, METRIC, gradient_norms(self.plan, gradient))
        return values

    def _on_input(self, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        inputs = (kwargs["hidden_states"],) if "hidden_states" in kwargs else (*args, *kwargs.values())
        if not self.layer:
            states = [x for x in _floating_tensors(inputs) if x.ndim == 3] or _floating_tensors(inputs)
            self.shape = states[0].shape if states else None
            self.edges[0] = self._edges(states[:1])
        elif len(self.edges[self.layer]) > 1:
            taken = {id(x) for x in inputs}
            self.edges[self.layer] = [pair for pair in self.edges[self.layer] if id(pair[0]) in taken]
        self.layer = max(self.layer + 1, self.first_layers[id(block)])

    def _on_output(self, block: nn.Module, args: Any, output: Any) -> None:
        self.edges[self.layer] = self._edges(_floating_tensors(output))

    def _edges(self, states: Sequence[Tensor]) -> list[tuple[Tensor, GradientEdge]]:
        """The tensors of the tokens' shape with their edges in the graph, which stay where they are when a
        later block writes into the tensor."""
        return [(x, get_gradient_edge(x)) for x in states if x.shape == self.shape and x.requires_grad]


def loss_in(output: Any, loss: LossFunction | None) -> Tensor | None:
    """The loss to differentiate: what the function returns or, without one, the output's own `loss`."""
    if loss is None:
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        return own if isinstance(own, Tensor) and own.requires_grad else None
    value = loss(output)
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        came = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        cut = " that no weight has a part in" if isinstance(value, Tensor) and value.numel() == 1 else ""
        raise MonitorError(
            "loss must be a function of what the model returns that gives a tensor of one number, to be "
            f"differentiated; it returned {came}{cut}",
            subject="loss",
        )
    return value


def _floating_tensors(value: Any) -> list[Tensor]:
    """The floating tensors in what a block takes or returns."""
    parts = value.values() if isinstance(value, Mapping) else value
    several = parts if isinstance(parts, Iterable) and not isinstance(parts, Tensor) else [parts]
    return [x for x in several if isinstance(x, Tensor) and x.is_floating_point()]

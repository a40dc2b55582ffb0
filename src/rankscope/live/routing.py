"""Routing of a mixture of experts, seen where a router returns.

transformers' routers return the scores of all experts, the weights of those that a token goes through, and
which these are, row by row of tokens:

    scores [row, expert],   weights [row, k],   chosen [row, k]

So whatever module in a block returns three such tensors is taken for a router, whoever wrote it. Rows are the
tokens of the batch, sample by sample. `Watch` hooks all modules; `recorder.py` hands each output to the
`RoutingReadings` of the call, with the layer that runs, and calls `check` when the call ends.
"""

from typing import Any

import torch
from torch import Tensor

from rankscope.errors import WatchError
from rankscope.live.hooks import isolated, to_float64_device
from rankscope.live.plan import WatchPlan
from rankscope.live.state_readings import TokenBatch
from rankscope.profiles import Readings, read_tensor


def routing_in(output: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """(scores, weights, chosen), detached, if a module returned a tuple that begins with these, as a router does; else
    None. An expert of -1 is none, as routers write it for a token that they drop; its weight is then 0."""
    if not isinstance(output, tuple) or len(output) < 3 or not all(isinstance(x, Tensor) for x in output[:3]):
        return None
    scores, weights, chosen = (x.detach() for x in output[:3])
    alike = weights.shape == chosen.shape and scores.shape[:-1] == chosen.shape[:-1] and scores.ndim > 1
    floating = scores.is_floating_point() and weights.is_floating_point()
    indices = chosen.dtype in (torch.int64, torch.int32)
    if not (alike and floating and indices) or bool(((chosen < -1) | (chosen >= scores.shape[-1])).any()):
        return None
    return scores, weights.masked_fill(chosen < 0, 0.0), chosen.clamp(min=0)


class RoutingReadings:
    """Reads the metrics of routing in one call; `readings` takes what is read."""

    def __init__(self, plan: WatchPlan, batch: TokenBatch, readings: list[tuple[int, Readings]]) -> None:
        self.plan, self.batch, self.readings = plan, batch, readings
        self.layers: set[int] = set()  # layers whose routing was seen
        self.other_shapes: list[tuple[int, ...]] = []  # shapes of routing that is not of the block's tokens

    def read(self, layer: int, output: Any) -> None:
        """Measure what a module in this layer returned, if it is a router."""
        routing = routing_in(output)
        if routing is None:
            return
        scores, weights, chosen = routing
        batch, token = self.batch.shape
        if layer in self.layers:
            came = f"a second came in block {layer}: name finer blocks with blocks=, or watch metrics of tokens"
            raise WatchError(f"a block must have one router for its routing to be read; {came}", subject="blocks")
        if chosen.shape[:-1].numel() != batch * token:
            self.other_shapes.append(tuple(chosen.shape))
            return
        self.layers.add(layer)
        if not self.plan.measures(layer):
            return
        with isolated(scores.device):
            shares = torch.zeros_like(scores).scatter_add(-1, chosen.long(), weights.to(scores.dtype))
            if self.plan.layout == "token first":
                shares = shares.reshape(token, batch, -1).transpose(0, 1)
            wide, valid = to_float64_device(shares.reshape(batch, token, -1)), self.batch.valid_for(shares)
            measured, _ = read_tensor("routing", wide, valid, self.plan.metrics, self.batch.unit)
        self.readings.append((layer, measured))

    def check(self) -> None:
        """Refuse a call in which metrics of routing were asked for and no router was seen."""
        if not self.plan.wants("routing") or self.layers:
            return
        came = f"one of rows {self.other_shapes[0]}" if self.other_shapes else "none"
        expected = f"a router of the blocks' {tuple(self.batch.shape)} tokens must return scores, weights and experts"
        raise WatchError(f"{expected}; {came} came: watch metrics of tokens", subject="routing")

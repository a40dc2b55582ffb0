"""Routing of a mixture of experts, seen where a router returns.

transformers' routers return the scores of all experts, the weights of those that a token goes through, and
which these are, row by row of tokens:

    scores [row, expert],   weights [row, k],   chosen [row, k]

So whatever module in a block returns three such tensors is a router, whoever wrote it. Rows are the tokens of
the batch, sample by sample.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.errors import WatchError
from rankscope.live.call import Call, Plan
from rankscope.live.isolation import isolated
from rankscope.live.reading import read_routing


@contextmanager
def routers(blocks: Sequence[nn.Module], seen: Callable[[Any], None]) -> Iterator[None]:
    """What every module inside the blocks returns is shown to `seen`."""
    parts = dict.fromkeys(part for block in blocks for part in block.modules() if part is not block)
    with ExitStack() as hooks:
        for part in parts:
            hooks.callback(part.register_forward_hook(lambda module, args, output: seen(output)).remove)
        yield


def routing_in(output: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """(scores, weights, chosen), where that is what a module returned."""
    if not isinstance(output, tuple) or len(output) < 3 or not all(isinstance(x, Tensor) for x in output[:3]):
        return None
    scores, weights, chosen = (x.detach() for x in output[:3])
    alike = weights.shape == chosen.shape and scores.shape[:-1] == chosen.shape[:-1] and scores.ndim > 1
    floating = scores.is_floating_point() and weights.is_floating_point()
    whole = chosen.dtype in (torch.int64, torch.int32)
    return (scores, weights, chosen) if alike and floating and whole else None


class Routing:
    """The part of a recorder that hears of routers."""

    plan: Plan
    call: Call | None

    def routed(self, output: Any) -> None:
        """A module inside a block has returned."""
        call = self.call
        if call is None or not call.inside or call.shape is None:
            return
        found = routing_in(output)
        if found is None:
            return
        layer, (batch, token) = call.inside[-1], call.shape
        if layer in call.routed:
            raise WatchError(
                f"a block must have one router for its routing to be read; a second one came in block {layer}"
                ": name finer blocks with blocks=, or watch metrics of tokens"
            )
        scores, weights, chosen = found
        if chosen.shape[:-1].numel() != batch * token:
            call.strays.append(tuple(chosen.shape))
            return
        call.routed.add(layer)
        if not self.plan.measures(layer):
            return
        with isolated(scores.device):
            p = torch.zeros_like(scores).scatter(-1, chosen.long(), weights.to(scores.dtype))
            turned = self.plan.layout == "token first"
            p = p.reshape(*((token, batch) if turned else (batch, token)), -1)
        read_routing(self.plan, call, layer, p.transpose(0, 1) if turned else p)

    def check_routed(self, call: Call) -> None:
        """Routing that was asked for must have been seen."""
        if not self.plan.wants("routing") or call.routed:
            return
        came = f"one of rows {call.strays[0]}" if call.strays else "none"
        raise WatchError(
            f"routing of the blocks' {tuple(call.shape or ())} tokens was asked for; {came} came through: it "
            "is read off modules that return scores, weights and the experts chosen, as transformers' "
            "routers do: watch metrics of tokens"
        )

"""Training batches, measured as they pass.

Each block is followed by an operator that hands its tokens over and gives nothing back. Compiled code calls
it as eager code does: it is one node of the graph, there is no break, and whether this step is looked at is
decided inside, when it runs, so that there is no second graph. A forward pass that is made again in the
backward pass (activation checkpointing) is not counted, nor is a call in eval mode: an evaluation between two
steps is no training batch.

Attention and what each head adds need more than a block's tokens, and layers that are lists of parts are not
called themselves: there the model is watched as by `watch` during the steps that count, which compiled code
cannot be.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from rankscope.errors import MonitorError
from rankscope.live.call import Call, Plan
from rankscope.live.mask import find_padding, masks_of
from rankscope.live.monitor.tally import Tallied
from rankscope.live.reading import arithmetic_of, read_state, read_waiting
from rankscope.live.spans import is_span
from rankscope.live.states import states_in
from rankscope.live.watch import Watch, around
from rankscope.metrics.tokens import real_tokens, unit_of

GRADIENT = "grad_tokens"
"""The size of the loss's gradient at a layer's tokens, times the number of samples: where the loss is a mean
over samples, the gradient of each sample's own."""

_open: WeakValueDictionary[int, "Passing"] = WeakValueDictionary()


@torch.library.custom_op("rankscope::called", mutates_args=("seen",))
def _called(mask: Tensor | None, name: str, seen: Tensor, of: int) -> None:
    """A call of the model begins, with this mask under this name."""
    found = _open.get(of)
    if found is not None and found.on:
        found.begin({} if mask is None else {name: mask})


@torch.library.custom_op("rankscope::passed", mutates_args=("seen",))
def _passed(x: Tensor, seen: Tensor, of: int, layer: int) -> None:
    """Tokens pass."""
    found = _open.get(of)
    if found is not None and found.on:
        found.saw(layer, x)


class Inline:
    """What is measured of training batches, in either way."""

    def __init__(self, model: nn.Module, plan: Plan, blocks: list[nn.Module]) -> None:
        beyond = any(each.of != "tokens" for each in plan.metrics) or any(map(is_span, blocks))
        plan = replace(plan, trained=True)
        self.way: Passing | Watched = (Watched if beyond else Passing)(model, plan, blocks)

    @property
    def on(self) -> bool:
        """Whether the step that is being made counts."""
        return self.way.on

    @on.setter
    def on(self, on: bool) -> None:
        self.way.turn(on)

    def taken(self) -> Tallied:
        """What was seen since the last time."""
        return self.way.taken()

    def close(self) -> None:
        """Let the model go."""
        self.way.close()


class Passing:
    """Through operators: metrics of tokens, and their gradients where the model is not compiled."""

    def __init__(self, model: nn.Module, plan: Plan, blocks: list[nn.Module]) -> None:
        self.plan, self.blocks, self.on = plan, blocks, False
        self.found = Tallied()
        self.call: Call | None = None
        self.seen = torch.zeros(1)  # written to by the operators, so that none is left out or moved
        self.several = len({*map(id, blocks)}) == len(blocks)
        """Whether each block is called once; else layers are numbered by the order of calls."""
        _open[id(self)] = self
        self._stack = ExitStack()
        # Hooks of the outermost module run outside of compiled code: the next one inside is as good.
        outer = next(iter(around(model, blocks[0])), model)
        self.masks = masks_of(outer)
        begins = self._begins if outer is not model else torch._dynamo.disable(self._begins)  # type: ignore[no-untyped-call]
        if self.masks or not self.several:
            self._hook(outer.register_forward_pre_hook(begins, with_kwargs=True))
        self._hook(blocks[0].register_forward_pre_hook(self._enters, with_kwargs=True))
        for k, block in enumerate(dict.fromkeys(blocks)):
            self._hook(block.register_forward_hook(self._leaves(k + 1 if self.several else -1)))

    def turn(self, on: bool) -> None:
        """Whether the next step counts."""
        self._end()
        self.on = on

    def taken(self) -> Tallied:
        """What was seen since the last time."""
        self._end()
        found, self.found = self.found, Tallied()
        if not found:
            raise MonitorError(
                "training batches are measured while the model is called in train mode; in this step it was "
                "not, or past its hooks (model.forward): call model(...) after model.train()"
            )
        return found

    def close(self) -> None:
        """Take the hooks away."""
        self.on = False
        _open.pop(id(self), None)
        self._stack.close()

    def begin(self, arguments: dict[str, Any]) -> None:
        """A call of the model begins."""
        if not _again():
            self._end()
            self.call = Call(arguments)

    def _end(self) -> None:
        """A call has ended: what was read of it counts."""
        call, self.call = self.call, None
        if call is not None:
            read_waiting(self.plan, call)
            for each in call.read(self.plan.metrics):
                self.found.read(*each)

    def saw(self, layer: int, x: Tensor) -> None:
        """The tokens of a layer."""
        if _again():
            return
        if self.call is None or (layer == 0 and self.call.shape is not None and self.several):
            self._end()
            self.call = Call({})  # nothing around the blocks said that it began
        call = self.call
        state = states_in(x, self.plan.layout, f"layer {layer}", self.plan.grid)[0]
        if layer < 0:  # one module called many times: layers by the order of calls
            layer = call.layer = call.layer + 1
        if call.shape is None:
            call.shape = state.shape[:2]
            padding = self.plan.padding
            if padding is None and self.plan.own_padding:
                found = find_padding([call.arguments], call.arguments, call.shape, self.plan.decoder)
                padding = None if found is None else found.at
            call.real[state.device] = real_tokens(call.shape, padding, state.device)
            call.whole = padding is None
            call.unit = unit_of(arithmetic_of(self.blocks, state))
        read_state(self.plan, call, layer, state)

    def _hook(self, handle: Any) -> None:
        self._stack.callback(handle.remove)

    def _idle(self, part: nn.Module) -> bool:
        # A graph must not depend on whether it is on; on the mode it depends anyway.
        return not part.training or (not torch.compiler.is_compiling() and not self.on)

    def _begins(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not self._idle(model):
            for name, place in self.masks:
                mask = kwargs.get(name, args[place] if place < len(args) else None)
                if isinstance(mask, Tensor):
                    _called(mask, name, self.seen, id(self))
                    return
            _called(None, "", self.seen, id(self))

    def _enters(self, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not self._idle(block) and (self.several or self.call is None or self.call.shape is None):
            given = kwargs.get("hidden_states", args)
            self._hand(0, given if isinstance(given, Tensor) else given[0])

    def _leaves(self, layer: int) -> Callable[[nn.Module, Any, Any], None]:
        def leaves(block: nn.Module, args: Any, output: Any) -> None:
            if not self._idle(block):
                self._hand(layer, _state(output, type(block).__name__))

        return leaves

    def _hand(self, layer: int, x: Tensor) -> None:
        """Over to the operator; and, where gradients can be asked for, to the backward pass."""
        _passed(x.detach(), self.seen, id(self), layer)
        if not torch.compiler.is_compiling() and x.requires_grad and not _again() and self.call is not None:
            at = self.call.layer if layer < 0 else layer
            if self.plan.measures(at):
                x.register_hook(lambda grad, at=at: self._gradient(at, grad))  # type: ignore[no-untyped-call]

    def _gradient(self, layer: int, grad: Tensor) -> None:
        if self.on:
            state = states_in(grad, self.plan.layout, "a gradient", self.plan.grid)[0]
            size = torch.linalg.vector_norm(state.double(), dim=(1, 2)) * len(state)
            self.found.add(layer, GRADIENT, size)


class Watched:
    """Through `watch`, entered for the steps that count."""

    def __init__(self, model: nn.Module, plan: Plan, blocks: list[nn.Module]) -> None:
        self.model, self.plan, self.blocks = model, plan, blocks
        self.watch: Watch | None = None
        self.found = Tallied()

    @property
    def on(self) -> bool:
        """Whether the step that is being made counts."""
        return self.watch is not None

    def turn(self, on: bool) -> None:
        """Whether the next step counts."""
        if on and self.watch is None:
            self.watch = Watch(self.model, self.plan, self.blocks, "as given").__enter__()
        elif not on:
            self._leave()

    def taken(self) -> Tallied:
        """What was seen since the last time."""
        watch = self.watch
        self._leave()
        found, self.found = self.found, Tallied()
        if not found and watch is not None:
            watch.profile()  # which says why there is none
        return found

    def close(self) -> None:
        """Take the hooks away."""
        self._leave()

    def _leave(self) -> None:
        if self.watch is None:
            return
        watch, self.watch = self.watch, None
        watch.__exit__(None, None, None)
        for each in watch.readings:
            self.found.read(*each)


def _state(output: Any, block: str) -> Tensor:
    """The tokens in what a block returned: of several tensors like them nothing here says which is right."""
    if isinstance(output, Tensor):
        return output
    found = [x for x in output if isinstance(x, Tensor) and x.is_floating_point() and x.ndim == 3]
    if len(found) != 1:
        raise MonitorError(
            f"of training batches a block's output must be its tokens; {block} returns {len(found)} tensors "
            "[batch, token, width]: give a probe"
        )
    return found[0]


def _again() -> bool:
    """Whether this runs inside a backward pass: a forward pass made again."""
    return torch._C._current_graph_task_id() != -1

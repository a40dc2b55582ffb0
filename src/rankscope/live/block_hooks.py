"""The hooks that report the run of a model and of its blocks, in order, to a `Recorder`.

`Watch` enters `attach_hooks` with a recorder. From then on, when the model is called:

1. `begin_call`: the model is called, or a module around the blocks by itself, as an encoder in generation;
2. `enter_block` and `leave_block`, for every block;
3. `end_call`: the model has returned, or failed.

A layer may be a `ModuleList` of parts that are called one by one, while the list itself is never called:
`ListedParts` makes one block of them.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from rankscope.live.attention.multihead import multihead_modules
from rankscope.live.padding import arguments_of


class BlockEvents(Protocol):
    """What `attach_hooks` reports to; `recorder.Recorder` is one."""

    def begin_call(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], alone: bool
    ) -> None:
        """The model is called, or, `alone`, a module around its blocks."""

    def end_call(self, failed: bool) -> None:
        """The model, or the module around the blocks, has returned or failed."""

    def enter_block(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A block is called with these arguments."""

    def leave_block(self, block: nn.Module, output: Any, failed: bool) -> None:
        """A block has returned this output, or failed."""

    def on_key_padding(self, mask: Tensor | None) -> None:
        """An `nn.MultiheadAttention` in a block is called with this `key_padding_mask`."""


def attach_hooks(
    stack: ExitStack, model: nn.Module, blocks: Sequence[nn.Module], events: BlockEvents
) -> None:
    """Hook a model and its blocks so that `events` hears of every call; `stack` takes the hooks away.

    Args:
        stack: Where the removal of each hook is registered.
        model: The model.
        blocks: Its blocks, each once.
        events: Whom to report to.
    """

    def before(module: nn.Module, called: Callable[[nn.Module, Any, Any], None]) -> None:
        stack.callback(module.register_forward_pre_hook(called, with_kwargs=True).remove)

    def after(module: nn.Module, called: Callable[[nn.Module, Any, Any], None]) -> None:
        stack.callback(module.register_forward_hook(called, always_call=True).remove)

    # Hooks of the modules around are registered first, so that they fire first where the model is a block.
    outer = [model, *modules_around(model, blocks[0])]
    for module in outer:
        before(module, partial(events.begin_call, alone=module is not model))
    lists = ListedParts(events)
    for block in blocks:
        if is_list_of_parts(block):
            for part in parts_of(block):
                before(part, partial(lists.part_called, block))
                after(part, lambda module, args, output: lists.part_returned(output, _failed(output)))
            continue
        before(block, events.enter_block)
        after(block, lambda module, args, output: events.leave_block(module, output, _failed(output)))
    if any(map(is_list_of_parts, blocks)):
        after(outer[-1], lambda module, args, output: lists.end_block(_failed(output)))
    for module in multihead_modules(blocks):
        before(
            module,
            lambda module, args, kwargs: events.on_key_padding(
                arguments_of(module, args, kwargs).get("key_padding_mask")
            ),
        )
    for module in outer:
        after(module, lambda module, args, output: events.end_call(_failed(output)))


def modules_around(model: nn.Module, block: nn.Module) -> list[nn.Module]:
    """The modules that hold a block, from the outside in, without the model itself and without mere lists."""
    named = model.named_modules(remove_duplicate=False)
    steps = next((name for name, part in named if part is block), "").split(".")[:-1]
    holders = [model.get_submodule(".".join(steps[: k + 1])) for k in range(len(steps))]
    return [part for part in holders if not isinstance(part, nn.ModuleList | nn.ModuleDict)]


def is_list_of_parts(block: nn.Module) -> bool:
    """True for a layer that is a `ModuleList` of parts, and is never called itself."""
    return isinstance(block, nn.ModuleList)


def parts_of(block: nn.Module) -> list[nn.Module]:
    """The modules in a list, and in lists in it, that are called; entries of a list may be None."""
    if not isinstance(block, nn.ModuleList):
        return [block]
    return [part for inner in block if inner is not None for part in parts_of(inner)]


class ListedParts:
    """Makes blocks of lists of parts that are called one by one.

    A block begins when the first of its parts is called, whichever that is, and ends when a part of another
    block is called, or the module that holds the blocks returns; its output is that of its last part.

    Args:
        events: Whom to report to.
    """

    def __init__(self, events: BlockEvents) -> None:
        self.events = events
        self._forget()

    def _forget(self) -> None:
        self.block: nn.Module | None = None
        """The block that runs."""
        self.called: set[nn.Module] = set()
        """Its parts that were called so far."""
        self.output: Any = None
        """What the last of these returned."""

    def part_called(self, block: nn.Module, part: nn.Module, args: Any, kwargs: Any) -> None:
        """A part of a block is called: a new block begins where it is another's, or was called before."""
        if block is not self.block or part in self.called:
            self.end_block()
            self.block = block
            self.events.enter_block(block, args, kwargs)
        self.called.add(part)

    def part_returned(self, output: Any, failed: bool) -> None:
        """A part has returned; if it failed, so did its block."""
        self.output = output
        if failed:
            self.end_block(failed)

    def end_block(self, failed: bool = False) -> None:
        """No more parts of the running block come: report that it was left."""
        if self.block is not None:
            block, output = self.block, self.output
            self._forget()
            self.events.leave_block(block, output, failed)


def _failed(output: Any) -> bool:
    """True while an exception passes: torch then calls these hooks with no output."""
    return output is None and sys.exc_info()[0] is not None

"""The hooks that report the run of a model and of its blocks to a `Recorder`, whose file has the order.

`Watch` attaches `BlockHooks`. A layer may be a `ModuleList` of parts that are called one by one, while the
list itself is never called: `ListedParts` makes one block of them.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn

from rankscope.live.attention import WatchedBlocks
from rankscope.live.attention.multihead import multihead_modules
from rankscope.live.recorder import Recorder


class BlockHooks:
    """The hooks of one watch: `before` is called, then observers may add theirs, then `after` is called. So a hook that
    an observer puts on a block runs while the recorder knows that the block runs."""

    def __init__(self, stack: ExitStack, blocks: WatchedBlocks, recorder: Recorder) -> None:
        self.stack, self.blocks, self.recorder = stack, blocks, recorder
        self.lists = ListedParts(recorder)
        self.outer = [blocks.model, *modules_around(blocks.model, blocks[0])]

    def before(self) -> None:
        """Hook what is called; modules around the blocks first, as the model may itself be a block."""
        for module in self.outer:
            self._pre_hook(module, partial(self.recorder.begin_call, alone=module is not self.blocks.model))
        for block in self.blocks:
            listed = isinstance(block, nn.ModuleList)
            for part in parts_of(block):
                self._pre_hook(part, partial(self.lists.part_called, block) if listed else self.recorder.enter_block)
        for module in multihead_modules(self.blocks):
            self._pre_hook(module, self.recorder.on_multihead)

    def after(self) -> None:
        """Hook what returns, the blocks before the modules around them."""
        for block in self.blocks:
            returned = self.lists.part_returned if isinstance(block, nn.ModuleList) else self.recorder.leave_block
            for part in parts_of(block):
                self._hook(part, returned)
        if has_listed_parts(self.blocks):
            self._hook(self.outer[-1], lambda module, output, failed: self.lists.end_block(failed))
        for module in self.outer:
            self._hook(module, lambda module, output, failed: self.recorder.end_call(failed))

    def _pre_hook(self, module: nn.Module, called: Callable[[nn.Module, Any, Any], None]) -> None:
        self.stack.callback(module.register_forward_pre_hook(called, with_kwargs=True).remove)

    def _hook(self, module: nn.Module, returned: Callable[[nn.Module, Any, bool], None]) -> None:
        """Call `returned` with the module, its output and whether it failed, also while it raises."""

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            returned(module, output, output is None and sys.exc_info()[0] is not None)

        self.stack.callback(module.register_forward_hook(hook, always_call=True).remove)


def modules_around(model: nn.Module, block: nn.Module) -> list[nn.Module]:
    """The modules that hold a block, from the outside in, without the model itself and without mere lists."""
    named = model.named_modules(remove_duplicate=False)
    steps = next((name for name, part in named if part is block), "").split(".")[:-1]
    holders = [model.get_submodule(".".join(steps[: k + 1])) for k in range(len(steps))]
    return [part for part in holders if not isinstance(part, nn.ModuleList | nn.ModuleDict)]


def has_listed_parts(blocks: Sequence[nn.Module]) -> bool:
    """True if some layer is a `ModuleList` of parts, which is never called itself."""
    return any(isinstance(block, nn.ModuleList) for block in blocks)


def parts_of(block: nn.Module) -> list[nn.Module]:
    """The block, or the modules in a list and in lists in it that are called; entries may be None."""
    if not isinstance(block, nn.ModuleList):
        return [block]
    return [part for inner in block if inner is not None for part in parts_of(inner)]


class ListedParts:
    """Makes blocks of lists of parts that are called one by one. A block begins when any of its parts is called, and
    ends when a part of another is, or the module that holds the blocks returns; its output is that of its last part."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._forget()

    def _forget(self) -> None:
        self.block: nn.Module | None = None  # the block that runs
        self.called: set[nn.Module] = set()  # its parts that were called so far
        self.output: Any = None  # what the last of these returned

    def part_called(self, block: nn.Module, part: nn.Module, args: Any, kwargs: Any) -> None:
        """A part of a block is called: a new block begins where it is another's, or was called before."""
        if block is not self.block or part in self.called:
            self.end_block()
            self.block = block
            self.recorder.enter_block(block, args, kwargs)
        self.called.add(part)

    def part_returned(self, part: nn.Module, output: Any, failed: bool) -> None:
        """A part has returned; if it failed, so did its block."""
        self.output = output
        if failed:
            self.end_block(failed)

    def end_block(self, failed: bool = False) -> None:
        """No more parts of the running block come: report that it was left."""
        if self.block is not None:
            block, output = self.block, self.output
            self._forget()
            self.recorder.leave_block(block, output, failed)

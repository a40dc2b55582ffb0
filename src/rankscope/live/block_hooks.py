"""The hooks that report the run of a model and of its blocks to a `Recorder`, whose file has the order.

`StackWatch` attaches the `block_hooks`. A layer may be a `ModuleList` of parts that are called one by one, while the
list itself is never called: `ListedParts` makes one block of them.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.live.attention import WatchedBlocks
from rankscope.live.recorder import Recorder

HookFunction = Callable[..., None]
HooksOfModules = list[tuple[nn.Module, HookFunction]]


def block_hooks(blocks: WatchedBlocks, recorder: Recorder) -> tuple[HooksOfModules, HooksOfModules]:
    """The hooks that report to a recorder: those before a module's forward pass, and those after it. Observers may add
    theirs in between, which on a block then run while the recorder knows that the block runs."""
    # Modules around the blocks come first when they are called and last when they return, as the model may itself
    # be a block.
    outer = [blocks.model, *modules_around(blocks.model, blocks[0])]
    calls: HooksOfModules = [
        (module, partial(recorder.begin_call, alone=module is not blocks.model)) for module in outer
    ]
    returns: HooksOfModules = []
    left, lists = _on_return(recorder.leave_block), ListedParts(recorder)
    part_left = _on_return(lists.part_returned)
    for block in blocks:
        if isinstance(block, nn.ModuleList):
            called = partial(lists.part_called, block)
            calls += [(part, called) for part in parts_of(block)]
            returns += [(part, part_left) for part in parts_of(block)]
        else:
            calls.append((block, recorder.enter_block))
            returns.append((block, left))
    calls += [(module, recorder.on_multihead) for module in recorder.multihead]
    if has_listed_parts(blocks):
        returns.append((outer[-1], _on_return(lambda module, output, failed: lists.end_block(failed))))
    ended = _on_return(lambda module, output, failed: recorder.end_call(failed))
    return calls, returns + [(module, ended) for module in outer]


def _on_return(returned: Callable[[nn.Module, Any, bool], None]) -> HookFunction:
    """A hook that calls `returned` with the module, its output and whether it failed, also while it raises."""

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        returned(module, output, output is None and sys.exc_info()[0] is not None)

    return hook


def modules_around(model: nn.Module, block: nn.Module) -> list[nn.Module]:
    """The modules that hold a block, from the outside in, without the model itself and without mere lists."""
    return [part for part in _holders(model, block) or () if not isinstance(part, (nn.ModuleList, nn.ModuleDict))]


def _holders(module: nn.Module, block: nn.Module) -> list[nn.Module] | None:
    """The modules between a module and a block in it, from the outside in; None if the block is not in it."""
    for part in module._modules.values():
        if part is block:
            return []
        if part is not None and (inside := _holders(part, block)) is not None:
            return [part, *inside]
    return None


def has_listed_parts(blocks: Sequence[nn.Module]) -> bool:
    """True if some layer is a `ModuleList` of parts, which is never called itself."""
    return any(isinstance(block, nn.ModuleList) for block in blocks)


def parts_of(block: nn.Module) -> list[nn.Module]:
    """The block, or the modules in a list and in lists in it that are called; entries may be None."""
    if not isinstance(block, nn.ModuleList):
        return [block]
    return [part for inner in block if inner is not None for part in parts_of(inner)]


@torch.no_grad()
def is_sum(x: Any, a: Any, b: Any) -> bool:
    """True if x is another tensor than b, and a + b to the bit."""
    alike = all(isinstance(y, Tensor) and y.shape == x.shape for y in (a, b)) if isinstance(x, Tensor) else False
    return alike and x is not b and torch.equal(x, a + b)


class ListedParts:
    """Makes blocks of lists of parts that are called one by one. A block begins when any of its parts is called, and
    ends when a part of another is, or the module that holds the blocks returns; its output is that of its last part.

    Where the parts are branches, and what each takes is added to what it gives outside of them (vit-pytorch), so is
    what the last one took."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._forget()

    def _forget(self) -> None:
        self.block: nn.Module | None = None  # the block that runs
        self.called: set[nn.Module] = set()  # its parts that were called so far
        self.output: Any = None  # what the last of these returned
        self.taken: Any = None  # what it took
        self.branches = False  # True if what a part took and returned was added up for the next

    def part_called(self, block: nn.Module, part: nn.Module, args: Any, kwargs: Any) -> None:
        """A part of a block is called: a new block begins where it is another's, or was called before."""
        if self.recorder.runs_elsewhere():
            return
        if block is not self.block or part in self.called:
            self.end_block()
            self.block = block
            self.recorder.enter_block(block, args, kwargs)
        elif not self.branches:
            self.branches = bool(args) and is_sum(args[0], self.taken, self.output)
        self.called.add(part)
        self.taken = args[0] if args else None

    def part_returned(self, part: nn.Module, output: Any, failed: bool) -> None:
        """A part has returned; if it failed, so did its block."""
        if self.recorder.runs_elsewhere():
            return
        self.output = output
        if failed:
            self.end_block(failed)

    def end_block(self, failed: bool = False) -> None:
        """No more parts of the running block come: report that it was left."""
        if self.block is not None and not self.recorder.runs_elsewhere():
            block, output = self.block, self.output
            if self.branches and isinstance(output, Tensor):
                output = output.detach() + self.taken.detach()
            self._forget()
            self.recorder.leave_block(block, output, failed)

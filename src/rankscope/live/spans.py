"""Blocks that are never called themselves: a `ModuleList` of the parts of one layer, called one by one.

Such a block begins when the first of its parts is called, whichever that is, and ends when a part of another
block is called, or the module that holds them returns; what its last part gave is what it gave.
"""

from collections.abc import Callable
from typing import Any

from torch import nn


def is_span(block: nn.Module) -> bool:
    """Whether a block is a list of parts."""
    return isinstance(block, nn.ModuleList)


def parts_of(block: nn.Module) -> list[nn.Module]:
    """The parts that are called, in no order; places may be empty."""
    if not isinstance(block, nn.ModuleList):
        return [block]
    return [part for each in block if each is not None for part in parts_of(each)]


class Spans:
    """Follows the parts, and tells of the blocks."""

    def __init__(
        self,
        enter: Callable[[nn.Module, Any, Any], None],
        leave: Callable[[nn.Module, Any, bool], None],
    ) -> None:
        self.enter, self.leave = enter, leave
        self.reset()

    def reset(self) -> None:
        """No block is running."""
        self.block: nn.Module | None = None
        self.called: set[nn.Module] = set()
        self.output: Any = None

    def before(self, block: nn.Module, part: nn.Module, args: Any, kwargs: Any) -> None:
        """A part of a block is called."""
        if block is not self.block or part in self.called:
            self.end()
            self.block = block
            self.enter(block, args, kwargs)
        self.called.add(part)

    def after(self, output: Any, failed: bool) -> None:
        """A part has returned."""
        self.output = output
        if failed:
            self.end(failed)

    def end(self, failed: bool = False) -> None:
        """No more parts of this block come."""
        if self.block is not None:
            block, output = self.block, self.output
            self.reset()
            self.leave(block, output, failed)

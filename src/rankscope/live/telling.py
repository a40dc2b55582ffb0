"""Blocks that tell their attention themselves, so that nothing has to be guessed from what they call.

A block of one's own that has a list `listeners` calls each of them, once in a forward pass, with the weights
P as they come to the values and with what each head adds to the stream.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeGuard, runtime_checkable

from torch import Tensor, nn

Told = Callable[[Tensor, Callable[[], Tensor]], None]
"""Takes P `[batch, head, token, token]`, and a function that gives what each head adds, `[batch, head, token,
width]`."""


@runtime_checkable
class Tells(Protocol):
    """A block that tells."""

    listeners: list[Told]


def all_tell(blocks: Sequence[nn.Module]) -> TypeGuard[Sequence[Tells]]:
    """Whether each of these blocks tells."""
    return all(isinstance(block, Tells) for block in blocks)


@contextmanager
def told_to(blocks: Sequence[Tells], listener: Told) -> Iterator[None]:
    """What these blocks tell is told to the listener."""
    for block in blocks:
        block.listeners.append(listener)
    try:
        yield
    finally:
        for block in blocks:
            block.listeners.remove(listener)

"""Blocks that tell their attention themselves, so that nothing has to be guessed from what they call.

A block of one's own that has a list `attention_listeners` calls each of them, once in a forward pass, with
the weights P as they come to the values and with what each head adds to the stream.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

Told = Callable[[Tensor, Callable[[], Tensor]], None]
"""Takes P `[batch, head, token, token]`, and a function that gives what each head adds, `[batch, head, token,
width]`."""


@runtime_checkable
class Tells(Protocol):
    """A block that tells."""

    attention_listeners: list[Told]


def told_to(blocks: Sequence[nn.Module], listener: Told) -> AbstractContextManager[None] | None:
    """Inside, what these blocks tell is told to the listener; None where not all of them tell."""
    tell = [block for block in blocks if isinstance(block, Tells)]
    return _listening(tell, listener) if len(tell) == len(blocks) else None


@contextmanager
def _listening(blocks: Sequence[Tells], listener: Told) -> Iterator[None]:
    for block in blocks:
        block.attention_listeners.append(listener)
    try:
        yield
    finally:
        for block in blocks:
            block.attention_listeners.remove(listener)

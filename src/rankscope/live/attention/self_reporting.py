"""Blocks that report their attention themselves, so that nothing has to be found out from what they call.

A block of one's own that has a list `attention_listeners` calls each listener, once in a forward pass, with
an `AttentionCall`. `lab.module.TrainedLayer` is such a block.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from rankscope.live.attention.observer import OnAttention, WatchedBlocks


class SelfReportingBlocks:
    """Observes blocks that all have `attention_listeners: list[OnAttention]`."""

    def applies(self, model: nn.Module, blocks: WatchedBlocks) -> bool:
        """True if every block has a list of listeners."""
        return all(isinstance(getattr(block, "attention_listeners", None), list) for block in blocks)

    @contextmanager
    def attach(self, blocks: WatchedBlocks, on_attention: OnAttention) -> Iterator[None]:
        """Inside, `on_attention` is one of the listeners of every block."""
        lists: list[list[OnAttention]] = [block.attention_listeners for block in blocks]
        for listeners in lists:
            listeners.append(on_attention)
        try:
            yield
        finally:
            for listeners in lists:
                listeners.remove(on_attention)

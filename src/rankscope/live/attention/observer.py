"""The seam between attention and what is measured of it: how one's own way to see attention is written.

An `AttentionObserver` is a class with two methods. `watch` goes through its list of observers in order, takes
the first whose `applies` says True, and keeps its `attach` entered while the model is watched. Whenever the
blocks attend, the observer calls `on_attention` with an `AttentionCall`; `attention_readings.py` reads the
metrics off it. The built-in observers are written in the same way, in this file (`SelfReportingBlocks`) and
its neighbours; `attention/__init__.py` lists them.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from rankscope.live.attention.scores import AnyScores
from rankscope.live.hooks import Hook
from rankscope.live.modules import WatchedBlocks
from rankscope.shapes import Bool, Float

Products = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # see `AttentionCall`


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """One call of attention inside a block, with what was computed in it.

    Tensors are functions without arguments, called only where a metric asks, while the block still runs.

    Args:
        pattern: The attention pattern `[batch, head, query, key]`, after the softmax and before dropout.
        head_outputs: The output of each head before the output projection, `[batch, query, head, d]`; what
            each head adds is then found with the linear layer that is called on it next.
        contributions: What each head adds to the hidden states, `[batch, head, query, width]`, where the
            observer knows the output projection; it goes before `head_outputs`.
        sizes: (batch, queries, keys) where these are known before the pattern is computed.
        self_attention: True if queries, keys and values are known to come from the block's own tokens, False
            if they do not. None if the observer cannot tell: then the first call in a block counts.
        remark: Where `self_attention` is False: what came instead, in words, for the error and the notes.
        altered_by: The operation that changed the pattern between softmax and values, which is refused.
        unused: True for a softmax of scores that was not multiplied with values when the block was left.
        hidden_tokens: `[batch, token]`, True at tokens that no token may attend to; None if no mask says so.
        scores: How the scores were made whose softmax the pattern is, for metrics that are read off them without the
            pattern; None, as the function or as what it gives, where that is not known.
        products: A function of some queries (their indices) and of their rows of a pattern, `[batch, head, row, key]`,
            that gives what attention gives with these rows and what it gave, `[batch, row, head, ...]` both. Scores
            are checked by it; None where that cannot be known, as with dropout.
        by_kernel: True if a kernel of torch was called with the queries, keys and mask that `scores` has, and gave the
            output: nothing of the model comes between, so that scores which were right once are right again.

    >>> import torch
    >>> call = AttentionCall(pattern=lambda: torch.full((1, 2, 3, 3), 1 / 3))
    >>> call.pattern().shape, call.self_attention
    (torch.Size([1, 2, 3, 3]), None)
    """

    pattern: Callable[[], Float[Tensor, "batch head query key"]]
    head_outputs: Callable[[], Float[Tensor, "batch query head d"]] | None = None
    contributions: Callable[[], Float[Tensor, "batch head query width"]] | None = None
    sizes: tuple[int, int, int] | None = None
    self_attention: bool | None = None
    remark: str = ""
    altered_by: str | None = None
    unused: bool = False
    hidden_tokens: Callable[[], Bool[Tensor, "batch token"] | None] = lambda: None
    scores: Callable[[], AnyScores | None] | None = None
    products: Products | None = None
    by_kernel: bool = False


OnAttention = Callable[[AttentionCall], None]


@runtime_checkable
class AttentionObserver(Protocol):
    """A way to see attention: one small class, passed to `watch(..., attention=[Mine(), *OBSERVERS])`.

    `docs/extending.md` writes one; `SelfReportingBlocks` is the shortest of the built-in ones.

    >>> from rankscope.live import OBSERVERS
    >>> [type(observer).__name__ for observer in OBSERVERS]
    ['SelfReportingBlocks', 'MultiheadModules', 'TransformersInterface', 'TorchFunctions']
    """

    def applies(self, model: nn.Module, blocks: WatchedBlocks) -> bool:
        """True if this observer can see the attention of these blocks."""

    def attach(self, blocks: WatchedBlocks, on_attention: OnAttention) -> AbstractContextManager[str | None]:
        """A context manager inside which every attention in the blocks is reported to `on_attention`.

        What the model computes must stay as it is, and leaving the context must leave no trace. The context
        may give a sentence for the notes of the watch (`with ... as sentence`), or None.
        """


class SelfReportingBlocks:
    """Observes blocks that report their attention themselves: each has a list `attention_listeners`, and
    calls every listener once in a forward pass with an `AttentionCall`, as `lab.model.TrainedLayer` does."""

    def applies(self, model: nn.Module, blocks: WatchedBlocks) -> bool:
        """True if every block has a list of listeners."""
        return all(isinstance(getattr(block, "attention_listeners", None), list) for block in blocks)

    @contextmanager
    def attach(self, blocks: WatchedBlocks, on_attention: OnAttention) -> Iterator[None]:
        """Inside, `on_attention` is one of the listeners of every block."""
        with ExitStack() as stack:
            listener = Hook(on_attention)
            for block in blocks:
                listeners: Any = block.attention_listeners
                listeners.append(listener)
                stack.callback(listeners.remove, listener)
            yield

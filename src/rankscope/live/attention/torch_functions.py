"""Attention that a module computes itself, seen in the functions of torch that it calls.

While a block runs, a torch function mode sees every call of torch in it, and returns its result unchanged. It reports
calls of `F.scaled_dot_product_attention` and of flex attention (`kernels.py`), and a softmax that is written out
(`softmax.py`). It follows the block's hidden states from call to call: attention whose queries and keys both come from
them is self-attention. Calls inside scripted or compiled code or `vmap` are not seen.

Order of events: the follower calls `block_entered`, which switches the mode on; torch calls `__torch_function__` for
every function; `block_left` reports softmaxes that came to no values; the last, or `call_ended`, switches it off.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from rankscope.live.attention.kernels import ScaledDotProduct, flex_attention_reported
from rankscope.live.attention.observer import AttentionCall, OnAttention
from rankscope.live.attention.softmax import FollowedTensors, SoftmaxTracer, WrittenSoftmax, is_mislaid, tensors_in
from rankscope.live.attention.transformers_interface import calls_torch, huggingface_model
from rankscope.live.modules import WatchedBlocks
from rankscope.live.processes import conversions_followed

_ATEN = torch.ops.aten.scaled_dot_product_attention
ATTENTION = (F.scaled_dot_product_attention, _ATEN, _ATEN.default)  # one function, by each of its names


class TorchFunctions:
    """Observes torch's attention functions, and softmaxes that are written out, in any module."""

    def applies(self, model: nn.Module, blocks: WatchedBlocks) -> bool:
        """True unless the blocks are a Hugging Face model's whose files mention none of these functions."""
        owner = huggingface_model(model, blocks)
        return owner is None or calls_torch(owner)

    @contextmanager
    def attach(self, blocks: WatchedBlocks, on_attention: OnAttention) -> Iterator[str]:
        """Inside, calls of attention in the blocks are reported while a block runs."""
        tracer = FunctionTracer(on_attention)
        blocks.listeners.append(tracer)
        try:
            with flex_attention_reported(blocks, tracer.attention_called):
                yield "Attention was seen in torch's functions, as it is before dropout."
        finally:
            blocks.listeners.remove(tracer)
            tracer.call_ended()


class FunctionTracer(TorchFunctionMode):
    """Follows the hidden states of blocks through torch's functions, and reports attention."""

    def __init__(self, on_attention: OnAttention) -> None:
        super().__init__()
        self.on_attention = on_attention
        self.depth = 0  # blocks entered and not yet left
        self.busy = False  # a function's result is looked at, while torch has taken this mode off its stack
        self.from_tokens = FollowedTensors()  # those computed from a running block's hidden states
        self.softmaxes = SoftmaxTracer(self.from_tokens)
        self._conversions = ExitStack()  # follows tensors to the other processes of a model and back

    def block_entered(self, hidden_states: Tensor | None) -> None:
        """Follow these hidden states from now on."""
        if hidden_states is not None:
            self.from_tokens.add(hidden_states)
        if not self.depth:
            self.thread = get_ident()  # torch keeps a stack of modes for each thread
            self._conversions.enter_context(conversions_followed(self.converted))
            self.__enter__()  # type: ignore[no-untyped-call]
        self.depth += 1

    def block_left(self, failed: bool) -> None:
        """Report the block's softmaxes of scores that came to no values; after the last block, switch off."""
        if not self.depth:
            return
        self.depth -= 1
        unused = self.softmaxes.take_unused()
        if not self.depth:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._conversions.close()
            self.from_tokens.clear()
            self.softmaxes.clear()
        for softmax in [] if failed else unused:
            self.on_attention(AttentionCall(pattern=softmax.pattern, sizes=softmax.sizes, unused=True))

    def call_ended(self) -> None:
        """Switch off, also if a block was interrupted; not from inside a function, where an error may end the call."""
        if self.depth and not self.busy and self.thread == get_ident():
            self.depth = 1
            self.block_left(failed=True)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        result = func(*args, **named)
        if not torch.compiler.is_compiling():
            self.busy = True
            try:
                self._look_at(func, args, named, result)
            finally:
                self.busy = False
        return result

    def _look_at(self, func: Any, args: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        """Follow the hidden states from a function's arguments to its result, and report attention."""
        if any(x in self.from_tokens for x in tensors_in((*args, *named.values()))):
            # An assignment returns nothing, and writes into its first argument.
            for x in tensors_in((result, args[0] if func is Tensor.__setitem__ else None)):
                self.from_tokens.add(x)
            if not any(map(is_functorch_wrapped_tensor, tensors_in((result,)))):
                softmax = self.softmaxes.follow(getattr(func, "__name__", ""), args, named, result)
                if softmax is not None:
                    self._report(*softmax)
        if func in ATTENTION and not is_functorch_wrapped_tensor(result):
            self.attention_called(ScaledDotProduct(result, *args, **named))

    def converted(self, x: Tensor, result: Tensor) -> None:
        """A tensor became a `DTensor`, or one a tensor: what comes from the tokens still does."""
        if x in self.from_tokens:
            self.from_tokens.add(result)

    def attention_called(self, call: ScaledDotProduct) -> None:
        """An attention function of torch returned; report it if a block runs."""
        if not self.depth:
            return
        output, query, key = call.given
        if query in self.from_tokens:
            self.from_tokens.add(output)
        followed = query in self.from_tokens and key in self.from_tokens
        self._report(call, followed and not is_mislaid(call.value, call.sizes))

    def _report(self, call: ScaledDotProduct | WrittenSoftmax, self_attention: bool) -> None:
        """Report attention, and whether it is known to be of the block's tokens to themselves."""
        remark = "attention whose queries and keys cannot both be followed back to the block's tokens"
        if call.head_width == call.sizes[1]:
            remark += " (heads are as wide as there are tokens: call it on another number of them)"
        names = ("pattern", "head_outputs", "sizes", "altered_by", "hidden_tokens", "scores", "products", "by_kernel")
        parts: Any = {name: getattr(call, name) for name in names}
        self.on_attention(AttentionCall(**parts, self_attention=self_attention, remark=remark))

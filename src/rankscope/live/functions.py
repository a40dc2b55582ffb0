"""Attention that a module computes itself, seen in the functions of torch that it calls.

While a block runs, a torch function mode looks at every call of torch in it, and hands on what the call gave,
as it is. Of `F.scaled_dot_product_attention` it takes the arguments, and computes the weights beside, as
torch documents them:

    P = softmax(Q K' scale + mask),   without dropout

That P V is what the call gave is checked every time. A softmax that is written out is `Softmax`. Whose tokens
attention looks at is found by following the block's state through the calls: where queries and keys both come
from it, tokens attend to themselves; keys from elsewhere are cross-attention. Calls inside scripted or
compiled code or `vmap` are not seen; flex attention, which compiles itself, is seen by `flex.py`.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from rankscope.errors import WatchError
from rankscope.live.heads import CLOSURE, ROUNDINGS, by_head
from rankscope.live.isolation import isolated
from rankscope.live.softmax import Softmax, Softmaxes, strays, tensors
from rankscope.metrics.tokens import unit_of

_ATEN = torch.ops.aten.scaled_dot_product_attention
ATTENTION = (F.scaled_dot_product_attention, _ATEN, _ATEN.default)
"""One function, by each of its names."""


class Attention:
    """One call of `F.scaled_dot_product_attention`: its arguments, by torch's names, and what it gave."""

    def __init__(
        self,
        output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float | int = 0.0,
        is_causal: bool = False,
        scale: float | int | None = None,
        enable_gqa: bool = False,
    ) -> None:
        self.output, self.query, self.key, self.value = output, query, key, value
        self.mask, self.dropout, self.causal, self.scale = attn_mask, dropout_p, is_causal, scale
        self.grouped = enable_gqa
        self.changed: str | None = None
        """Nothing comes between these weights and their values."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(samples, tokens that look, tokens looked at)"""
        samples = self.query.shape[0] if self.query.ndim > 2 else 1
        return samples, self.query.shape[-2], self.key.shape[-2]

    @property
    def wide(self) -> int:
        """Entries of a head's values."""
        return self.value.shape[-1]

    def weights(self) -> tuple[Tensor, Tensor]:
        """The weights `[batch, head, token, token]` and the heads' outputs `[batch, token, head, d]`."""
        with isolated(self.query.device):
            P = self._weights()
            if not self.dropout:
                self._check(P)
            return by_head(P), by_head(self.output.detach()).transpose(1, 2)

    def _weights(self) -> Tensor:
        query, key = self._cast(self.query), self._cast(self.key)
        scale = 1 / math.sqrt(query.shape[-1]) if self.scale is None else self.scale
        if self.grouped:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        scores, mask = self._modified(query @ key.mT * scale), self._mask()
        if self.causal:
            ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill_(ahead, -torch.inf)
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        elif mask is not None:
            scores = scores + mask
        blind = (scores == -torch.inf).all(-1, keepdim=True)  # a row that sees nothing gets nothing
        return scores.softmax(-1).masked_fill_(blind, 0.0)

    def _modified(self, scores: Tensor) -> Tensor:
        return scores

    def _mask(self) -> Tensor | None:
        if (materialise := getattr(self.mask, "_materialize", None)) is not None:  # torch.nn.attention.bias
            return materialise(self.query.device)
        return None if self.mask is None else self.mask.detach()

    def unseen(self) -> Tensor | None:
        """`[batch, token]`: tokens that the mask lets no token look at; None where it says nothing of it."""
        mask = self._mask()
        if mask is None or mask.ndim < 3:  # the same for every sample: no padding
            return None
        mask = mask.expand(*self.query.shape[:-1], self.key.shape[-2])
        hidden = mask < -1e3 if mask.is_floating_point() else ~mask
        return by_head(hidden).all(2).all(1)

    def _cast(self, x: Tensor) -> Tensor:
        """As the kernel took it under autocast; and then wide enough for a softmax."""
        x = x.detach().to(self.output.dtype)
        return x.to(torch.promote_types(x.dtype, torch.float32))

    def _check(self, P: Tensor) -> None:
        value = self._cast(self.value)
        if self.grouped:
            value = value.repeat_interleave(P.shape[-3] // value.shape[-3], -3)
        given = self.output.detach().to(P.dtype)
        miss = (P @ value - given).norm() / given.norm().clamp(min=1e-30)
        if bool(miss > max(CLOSURE, ROUNDINGS * unit_of(self.output.dtype))):  # never where there is NaN
            raise WatchError(
                "attention weights times values must be what torch's attention gave; they miss "
                f"it by {float(miss):.1e} of its size: watch metrics of tokens"
            )


Seen = Callable[[Attention | Softmax, bool], None]
"""Takes attention, and whether its queries and keys both come from the block's tokens."""


class Functions(TorchFunctionMode):
    """On from when a block is entered until it is left; shows its calls of attention to `seen`."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen
        self.depth = 0
        self.own = WeakTensorKeyDictionary()
        """Tensors that come from the state of a block that is being run."""
        self.softmaxes = Softmaxes(self.own)

    def start(self, states: Iterable[Tensor]) -> None:
        """A block is entered with this state."""
        for x in states:
            self.own[x] = True
        if not self.depth:
            self.__enter__()  # type: ignore[no-untyped-call]
        self.depth += 1

    def stop(self) -> list[Softmax]:
        """A block is left; gives the softmaxes of its tokens' scores that no values were weighted with."""
        self.depth -= 1
        unused = self.softmaxes.unused()
        if not self.depth:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self.own.clear()
            self.softmaxes.clear()
        return unused

    def close(self) -> None:
        """Off, also where a block was interrupted."""
        if self.depth:
            self.depth = 1
            self.stop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        found = func(*args, **given)
        if torch.compiler.is_compiling():
            return found
        if any(x in self.own for x in tensors((*args, *given.values()))):
            # What an assignment writes into is no result.
            for x in tensors((found, args[0] if func is Tensor.__setitem__ else None)):
                self.own[x] = True
            if not any(map(is_functorch_wrapped_tensor, tensors((found,)))):
                name = getattr(func, "__name__", "")
                written = self.softmaxes.follow(name, args, given, found)
                if written is not None:
                    self.seen(*written)
        if func in ATTENTION and not is_functorch_wrapped_tensor(found):
            self.called(Attention(found, *args, **given))
        return found

    def called(self, call: Attention) -> None:
        """Attention was called, while a block runs or not."""
        if not self.depth:
            return
        if call.query in self.own:
            self.own[call.output] = True
        own = call.query in self.own and call.key in self.own
        self.seen(call, own and not strays(call.value, call.sizes))

"""Long contexts: attention a block of rows at a time, so that no `[head, token, token]` is held.

The rules are the plain ones. In the place of P stand numbers of each of its rows, those that are asked for;
where none is, torch's fused attention takes the place of the rows as well.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rankscope.nets.architecture import Architecture
from rankscope.nets.kernels import KernelContext, kernel_of
from rankscope.nets.masks import Mask, spec_of
from rankscope.nets.plain import Heads, Plain, Spoken, Tokens
from rankscope.nets.setting import Setting
from rankscope.nets.transformer import Step, Transformer
from rankscope.nets.traversal import Block

Numbers = Mapping[str, Callable[[Tensor, Tensor], Tensor]]
"""By name, what is asked of rows of P `[batch, head, row, token]`, and of which tokens count
`[batch, 1, token]`: a number for each row."""
AT_ONCE = 2**22
"""Bytes of a block of rows of one head: what a core's cache holds."""
KERNELS = ("softmax", "gaussian", "uniform", "sigmoid", "linear")
"""Kernels whose rows need no other rows."""


@dataclass
class RowNumbers:
    """What is known of P: numbers of its rows."""

    q: Heads | None
    k: Heads | None
    of: dict[str, Float[Tensor, "batch head token"]] = field(default_factory=dict)
    """By name, float64."""


def streams(arch: Architecture) -> bool:
    """Whether rows of attention can be taken one block at a time: nothing that positions add to the scores,
    which is a matrix itself, no part of one's own that changes P, no memory to attend to."""
    return (
        arch.kernel in KERNELS
        and arch.positions not in ("bias", "alibi", "relative")
        and not arch.cross_attention
        and not any(part.place == "weights" for part in arch.parts)
    )


class Streamed(Plain):
    """Plain rules, attention by blocks of rows."""

    def __init__(self, arch: Architecture, setting: Setting, numbers: Numbers) -> None:
        super().__init__(arch, setting)
        self.numbers = numbers
        self.all_real = bool(setting.real.all())

    def weights(self, block: Block, X: Tokens) -> RowNumbers:  # type: ignore[override]
        """Queries and keys: rows are made as they are mixed."""
        q, k, _ = self.scored(block, X)
        return RowNumbers(q, k)

    def mix(self, block: Block, P: RowNumbers, V: Heads) -> Spoken:  # type: ignore[override]
        """`P_h V_h` of every head, and the numbers of the rows of P on the way."""
        arch, q, k = self.arch, P.q, P.k
        assert q is not None and k is not None
        P.q = P.k = None
        mask = arch.mask_of(block.index)
        if not self.numbers and self.all_real and mask in ("complete", "causal") and _fused(arch):
            heads = F.scaled_dot_product_attention(
                q, k, V, is_causal=mask == "causal", scale=1 / arch.divisor
            )
        else:
            heads = self._by_rows(mask, P, q, k, V)
        return self.heard(block, heads)

    def _by_rows(self, mask: str | Mask, P: RowNumbers, q: Heads, k: Heads, V: Heads) -> Heads:
        n = q.shape[2]
        back = "causal" in spec_of(mask).split("&")
        rows = max(1, AT_ONCE // max(1, len(q) * n * q.element_size()))
        said = torch.empty_like(q[..., :1]).expand(*q.shape[:-1], V.shape[-1]).contiguous()
        P.of = {name: q.new_empty(q.shape[:-1], dtype=torch.float64) for name in self.numbers}
        for start in range(0, n, rows):
            stop = min(n, start + rows)
            seen = stop if back else n  # nothing lies ahead
            weights = self._weights(mask, start, stop, seen)
            real = self.setting.real[:, None, :seen]
            for head in range(q.shape[1]):
                here = slice(head, head + 1)
                part = weights(q[:, here, start:stop], k[:, here, :seen])
                said[:, here, start:stop] = part @ V[:, here, :seen]
                for name, number in self.numbers.items():
                    P.of[name][:, here, start:stop] = number(part, real)
        return said

    def _weights(
        self, mask: str | Mask, start: int, stop: int, seen: int
    ) -> Callable[[Tensor, Tensor], Float[Tensor, "batch head row token"]]:
        """From queries of some rows and the keys that they may see to weights."""
        arch = self.arch
        if not (self.all_real and mask in ("complete", "causal") and arch.kernel == "softmax"):
            visible = self.setting.rows(mask, start, stop)[..., :seen]
            context = KernelContext(visible, None, arch.divisor, arch.score_cap)
            return lambda q, k: kernel_of(arch.kernel).weights(q, k, context)
        # No mask of all that is seen: a token of these rows hides only others of them.
        ahead = torch.ones(
            stop - start, stop - start, dtype=torch.bool, device=self.setting.real.device
        ).triu(1)

        def softmax(q: Tensor, k: Tensor) -> Tensor:
            s = (q / arch.divisor) @ k.mT
            s = arch.score_cap * torch.tanh(s / arch.score_cap) if arch.score_cap else s
            if mask == "causal":
                s[..., start:].masked_fill_(ahead, -torch.inf)
            return s.softmax(-1)

        return softmax


def _fused(arch: Architecture) -> bool:
    return arch.kernel == "softmax" and not arch.score_cap


def streamed(
    net: Transformer, X: Tensor, padding: Tensor | None, numbers: Numbers
) -> Iterator[tuple[Step, RowNumbers | None]]:
    """`net.steps`, with numbers of the rows of attention in the place of attention."""
    X, real, order = net.prepared(X, padding)
    setting = Setting.of(net.arch, net.weights, X, real, net.memory, whole_masks=False)
    yield Step(0, X if order is None else order.restored(X), None), None
    for step in net.traversed(X, real, Streamed(net.arch, setting, numbers)):
        found: RowNumbers = step.attention  # type: ignore[assignment]
        step = step._replace(attention=None)
        if order is not None:
            step = step.restored(order)
            found = replace(found, of={name: order.restored_columns(each) for name, each in found.of.items()})
        yield step, found


def size_of_attention(arch: Architecture, samples: int, tokens: int) -> int:
    """Bytes of P of one layer in float64."""
    return samples * arch.heads * tokens**2 * 8

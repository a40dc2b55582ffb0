"""Rows of attention, computed from queries and keys when they are needed, so that P is never held.

A row of a softmax with scores s, whose largest is m, is `e / Z`, `e_j = exp(s_j - m)`, `Z = sum e`. Its
entropy needs no logarithm of weights: `H = log Z + sum_j e_j (m - s_j) / Z`, two terms that are never
negative. Where all scores are small m is taken to be 0.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rankscope.nets.architecture import Architecture
from rankscope.nets.kernels import KernelContext, Visible, kernel_of
from rankscope.shapes import Float

Block = Float[Tensor, "batch head row token"]
OfRows = Float[Tensor, "batch head row"]
LEVEL = 8.0  # A size of scores whose exponentials are harmless, and at which entropy is rounded as `-sum P log P` is


class SoftmaxRows(NamedTuple):
    """Some rows of a softmax: `exp(s - m)`, zero where nothing is seen and overwritten by the next rows; Z, 1
    of a row that sees nothing; and the entropy, if wanted."""

    e: Block
    total: OfRows
    entropy: OfRows | None


@dataclass
class AttentionRows:
    """What the rows of P of a layer are computed from."""

    arch: Architecture
    q: Float[Tensor, "batch head row_of_all head_width"]
    k: Float[Tensor, "batch head token head_width"]
    visible: Callable[[int, int], Visible] | None
    """(start, stop) to what these rows see; None if that is all, or all up to the row itself."""
    behind: bool  # Whether no row sees a later token
    added: Callable[[slice, int, int], Tensor] | None = None
    """(heads, start, stop) to what positions add to the scores, after the divisor."""
    _buffers: dict[str, Tensor] = field(default_factory=dict)

    @property
    def is_softmax(self) -> bool:
        """Whether a row is a softmax of scores."""
        return bool(kernel_of(self.arch.kernel).softmax_of)

    @property
    def fused(self) -> bool:
        """Whether torch's fused attention computes the same."""
        plain = kernel_of(self.arch.kernel).softmax_of == "products" and not self.arch.score_cap
        return plain and self.visible is None and self.added is None

    @cached_property
    def level(self) -> bool:
        """Whether no score is above `LEVEL`, by `|q_i . k_j| <= |q_i| |k_j|`: then m may as well be 0."""
        if kernel_of(self.arch.kernel).softmax_of != "products" or self.added is not None:
            return False
        largest = [torch.linalg.vector_norm(x, dim=-1).amax() for x in (self.q, self.k) if x.numel()]
        return len(largest) == 2 and bool(largest[0] * largest[1] <= LEVEL * self.arch.divisor)

    def seen(self, stop: int) -> int:
        """How many tokens rows before `stop` may see."""
        return stop if self.behind else self.k.shape[2]

    def pattern(self, samples: slice, heads: slice, start: int, stop: int) -> Block:
        """Rows `start` to `stop` of P, up to the last token that they may see."""
        if self.is_softmax:
            rows = self.softmaxed(samples, heads, start, stop)
            return rows.e / rows.total[..., None]
        added = None if self.added is None else self._added(samples, heads, start, stop)
        visible = self._visible(samples, start, stop)
        context = KernelContext(visible, added, self.arch.divisor, self.arch.score_cap)
        q, k = self.q[samples, heads, start:stop], self.k[samples, heads, : self.seen(stop)]
        return kernel_of(self.arch.kernel).pattern(q, k, context)

    def whole_rows(self, sample: int, head: int, start: int, stop: int) -> Float[Tensor, "row token"]:
        """Rows of one head of one sample, of all tokens, in float64."""
        rows = self.pattern(slice(sample, sample + 1), slice(head, head + 1), start, stop)[0, 0]
        return F.pad(rows, (0, self.k.shape[2] - rows.shape[-1])).to(torch.float64)

    def softmaxed(self, samples: slice, heads: slice, start: int, stop: int, entropy: bool = False) -> SoftmaxRows:
        """Return rows `start` to `stop` of a softmax before they are divided by their sums."""
        s = self._scores(samples, heads, start, stop)
        blind, least = None, torch.finfo(s.dtype).min / 4
        if self.visible is None:
            if self.behind:  # a token of these rows hides only others of them
                ahead = torch.ones(stop - start, stop - start, dtype=torch.bool, device=s.device).triu(1)
                s[..., start:].masked_fill_(ahead, least)
        else:
            visible = self._visible(samples, start, stop)
            s.masked_fill_(~visible, least)
            blind = ~visible.any(-1)
        if not self.level:
            s -= s.amax(-1, keepdim=True)
        e = torch.exp(s, out=self._buffer("e", tuple(s.shape), s))
        total = e.sum(-1)
        if blind is not None:
            e.masked_fill_(blind[..., None], 0.0)
            total.masked_fill_(blind, 1.0)
        return SoftmaxRows(e, total, total.log() - s.mul_(e).sum(-1) / total if entropy else None)

    def _scores(self, samples: slice, heads: slice, start: int, stop: int) -> Block:
        arch, seen = self.arch, self.seen(stop)
        q, k = self.q[samples, heads, start:stop] / arch.divisor, self.k[samples, heads, :seen]
        wide = torch.promote_types(q.dtype, torch.float32)
        s = self._buffer("s", (*q.shape[:2], stop - start, seen), q)
        torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT, out=s.flatten(0, 1))
        s = s.to(wide)
        if kernel_of(arch.kernel).softmax_of == "distances":  # |q_i|^2 is constant along a row
            s -= (k.square().sum(-1) / (2 * arch.divisor))[..., None, :]
        if self.added is not None:
            s += self._added(samples, heads, start, stop)
        if arch.score_cap:
            s.div_(arch.score_cap).tanh_().mul_(arch.score_cap)
        return s

    def _added(self, samples: slice, heads: slice, start: int, stop: int) -> Tensor:
        assert self.added is not None
        rows = self.added(heads, start, stop)[..., : self.seen(stop)]
        return rows if rows.ndim < 4 or len(rows) == 1 else rows[samples]

    def _visible(self, samples: slice, start: int, stop: int) -> Visible:
        if self.visible is not None:
            visible = self.visible(start, stop)
        else:
            visible = torch.ones(stop - start, self.k.shape[2], dtype=torch.bool, device=self.q.device)
            visible = (visible.tril(start) if self.behind else visible)[None, None]
        visible = visible[..., : self.seen(stop)]
        return visible if len(visible) == 1 else visible[samples]

    def _buffer(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Memory that is used again for every block: new memory would be cleared by the system every time."""
        size, buffer = torch.Size(shape).numel(), self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.dtype != like.dtype:
            buffer = self._buffers[name] = like.new_empty(size)
        return buffer[:size].view(shape)

"""Long contexts: attention a block of rows at a time, so that no `[head, token, token]` is held.

The rules are the plain ones, with metrics of P instead of P; where none is wanted, torch's fused attention
computes the outputs of heads. Rows are computed from queries and keys when they are needed (`AttentionRows`).

A row of a softmax with scores s, whose largest is m, is `e / Z`, `e_j = exp(s_j - m)`, `Z = sum e`. Its
entropy needs no logarithm of weights: `H = log Z + sum_j e_j (m - s_j) / Z`, two terms that are never
negative. Where all scores are small m is taken to be 0.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rankscope.metrics import PatternRows, defect_of_rows, entropy_of_rows, first_token_of_rows
from rankscope.nets.architecture import Architecture
from rankscope.nets.kernels import KernelContext, Visible, kernel_of
from rankscope.nets.masks import spec_of
from rankscope.nets.pass_settings import PassSettings, TokenOrder
from rankscope.nets.plain import HeadOutputs, Heads, Plain, Step, Tokens
from rankscope.nets.positions import by_offset, score_bias
from rankscope.nets.transformer import Transformer
from rankscope.nets.traversal import Block
from rankscope.shapes import Float

RowBlock = Float[Tensor, "batch head row token"]
OfRows = Float[Tensor, "batch head row"]
LEVEL = 8.0  # A size of scores whose exponentials are harmless, and at which entropy is rounded as `-sum P log P` is
AT_ONCE = {"cpu": 2**23, "cuda": 2**28}
"""Bytes of a block of rows: of one head what a processor's cache holds; of all heads elsewhere."""


class SoftmaxRows(NamedTuple):
    """Some rows of a softmax: `exp(s - m)`, zero where nothing is seen and overwritten by the next rows; Z, 1
    of a row that sees nothing; and the entropy, if wanted."""

    e: RowBlock
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

    def pattern(self, samples: slice, heads: slice, start: int, stop: int) -> RowBlock:
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

    def _scores(self, samples: slice, heads: slice, start: int, stop: int) -> RowBlock:
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


@dataclass(frozen=True)
class AttentionRequest:
    """Metrics of attention that are wanted, by name."""

    by_row: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = field(default_factory=dict)
    """(rows of P `[batch, head, row, token]`, valid tokens `[batch, 1, token]`) to a number per row."""
    by_head: Mapping[str, Callable[[PatternRows], Tensor]] = field(default_factory=dict)
    """P, whose rows are computed as often as they are read, to a number per head."""
    block_bytes: int | None = None  # The bytes of a block of rows; None takes `AT_ONCE`


@dataclass
class PatternNumbers:
    """Metrics of P by name, in float64, and what its rows are computed from, until that is done."""

    rows: AttentionRows | None
    of_rows: dict[str, Float[Tensor, "batch head token"]] = field(default_factory=dict)
    of_heads: dict[str, Float[Tensor, "batch head"]] = field(default_factory=dict)

    def restored(self, order: TokenOrder) -> "PatternNumbers":
        """Put tokens back where they stood."""
        of_rows = {name: order.restored_columns(values) for name, values in self.of_rows.items()}
        return replace(self, of_rows=of_rows)


def streams(arch: Architecture) -> bool:
    """Whether rows of attention can be computed one block at a time: no part changes P or reads whole masks,
    and scores do not depend on the number of tokens."""
    needs_all = any(part.place == "pattern" or getattr(part, "sees", False) for part in arch.pieces)
    by_number = arch.positions == "disentangled" or arch.log_gain
    return kernel_of(arch.kernel).by_row and not by_number and not needs_all


class StreamedPlain(Plain):
    """Plain rules, attention by blocks of rows."""

    def __init__(self, net: Transformer, settings: PassSettings, request: AttentionRequest) -> None:
        super().__init__(net.arch, settings)
        self.net, self.request = net, request
        self.all_valid = bool(settings.valid.all())

    def pattern(self, block: Block, X: Tokens) -> PatternNumbers:  # type: ignore[override]
        """Queries and keys: rows are made as they are mixed."""
        q, k, added = self.scored(block, X)
        mask = self.arch.mask_of(block.index)
        simple = self.all_valid and mask in ("complete", "causal")
        visible = None if simple else partial(self.settings.rows, mask)
        behind = "causal" in spec_of(mask).split("&")
        return PatternNumbers(AttentionRows(self.arch, q, k, visible, behind, self._rows_added(block, added)))

    def added(self, block: Block, q: Heads) -> Tensor | None:
        """Return the queries that meet relative positions (Transformer-XL); what they add is made by rows."""
        bias = block.weights.attention.position_bias
        return None if self.settings.sinusoids is None or bias is None else q + bias[:, None]

    def _rows_added(self, block: Block, queries: Tensor | None) -> Callable[[slice, int, int], Tensor] | None:
        arch, settings = self.arch, self.settings
        if queries is not None:
            w, sinusoids = block.weights.attention, settings.sinusoids
            assert sinusoids is not None
            q, table, divisor = queries, sinusoids, arch.divisor
            return lambda heads, start, stop: by_offset(q[:, heads, start:stop], w, table, heads, start) / divisor
        if arch.positions not in ("bias", "alibi"):
            return None
        n, like = settings.valid.shape[1], block.weights.attention.query.weight
        bias = partial(score_bias, arch, self.net.weights, n, like)
        return lambda heads, start, stop: bias(start, stop)[heads]

    def mix(self, block: Block, P: PatternNumbers, V: Heads) -> HeadOutputs:  # type: ignore[override]
        """`P_h V_h` of every head, and the numbers of P on the way."""
        rows, P.rows = P.rows, None
        assert rows is not None
        heads = self._outputs(rows, V, P)
        pattern = PatternRows(len(V), V.shape[1], rows.whole_rows, self.settings.valid)
        P.of_heads = {name: metric(pattern) for name, metric in self.request.by_head.items()}
        return self.only_active(block, heads)

    def cross(self, block: Block, X: Tokens) -> Tokens:
        """Queries of the tokens, keys and values of the memory, by rows too."""
        cross_block, M = block.cross_block, self.settings.memory
        assert M is not None
        q, k = self.cross_scored(cross_block, X)
        all_seen = self.all_valid and bool(M.valid.all())
        visible = None if all_seen else lambda start, stop: M.visible(self.settings.valid[:, start:stop])
        heads = self._outputs(AttentionRows(self.arch, q, k, visible, False), self.values(cross_block, M.tokens), None)
        return self.output(cross_block, self.only_active(cross_block, heads))

    def _outputs(
        self, rows: AttentionRows, V: Heads, P: PatternNumbers | None
    ) -> Float[Tensor, "batch head row head_width"]:
        """`P V`; metrics of rows are written into P, if it is given."""
        wanted = self.request.by_row if P is not None else {}
        q = rows.q
        # On a GPU torch has no fused kernel for float64, and would hold P.
        if not wanted and rows.fused and not (q.is_cuda and q.dtype == torch.float64):
            scale = 1 / self.arch.divisor
            return F.scaled_dot_product_attention(q, rows.k, V, is_causal=rows.behind, scale=scale)
        batch, heads, n = q.shape[:3]
        together = 1 if q.device.type == "cpu" else heads
        block_bytes = self.request.block_bytes or AT_ONCE.get(q.device.type, AT_ONCE["cuda"])
        count = max(1, block_bytes // max(1, batch * together * V.shape[2] * q.element_size()))  # rows at once
        outputs = q.new_empty(*q.shape[:-1], V.shape[-1])
        numbers = {name: q.new_empty(q.shape[:-1], dtype=torch.float64) for name in wanted}
        for start in range(0, n, count):
            stop = min(n, start + count)
            seen = rows.seen(stop)
            for head in range(0, heads, together):
                block = slice(0, batch), slice(head, head + together), start, stop
                entropy = entropy_of_rows in wanted.values()
                part = rows.softmaxed(*block, entropy) if rows.is_softmax else rows.pattern(*block)
                region = slice(None), block[1], slice(start, stop)
                outputs[region] = _averaged(part, V[:, block[1], :seen])
                for name, metric in wanted.items():
                    numbers[name][region] = _metric(part, metric, self.settings.valid[:, None, :seen])
        if P is not None:
            P.of_rows = numbers
        return outputs


def _averaged(part: SoftmaxRows | Tensor, V: Heads) -> Float[Tensor, "batch head row head_width"]:
    if not isinstance(part, SoftmaxRows):
        return part @ V
    if part.e.dtype != V.dtype:  # weights are rounded as a model in half precision rounds them
        return (part.e / part.total[..., None]).to(V.dtype) @ V
    return (part.e @ V) / part.total[..., None]


def _metric(part: SoftmaxRows | Tensor, metric: Callable[[Tensor, Tensor], Tensor], valid: Tensor) -> Tensor:
    """A metric of rows; three of a softmax need no division of the whole row."""
    if not isinstance(part, SoftmaxRows):
        return metric(part, valid)
    if metric is entropy_of_rows and part.entropy is not None:
        return part.entropy
    if metric is first_token_of_rows:  # valid tokens stand first
        return part.e[..., 0] / part.total
    if metric is defect_of_rows:  # rows are divided by their sum: 0, or NaN
        return part.total / part.total - 1
    return metric(part.e / part.total[..., None], valid)


def streamed(
    net: Transformer, X: Tensor, padding: Tensor | None, request: AttentionRequest
) -> Iterator[tuple[Step, PatternNumbers | None]]:
    """`net.steps`, with numbers of attention in the place of attention."""
    X, valid, order = net.prepared(X, padding)
    settings = PassSettings.of(net.arch, net.weights, X, valid, net.memory, whole_masks=False)
    yield Step(0, X if order is None else order.restored(X), None), None
    for step in net.traversed(X, valid, StreamedPlain(net, settings, request)):
        numbers: PatternNumbers = step.attention  # type: ignore[assignment]
        step = step._replace(attention=None)
        if order is not None:
            step, numbers = step.restored(order), numbers.restored(order)
        yield step, numbers


def size_of_attention(arch: Architecture, samples: int, tokens: int) -> int:
    """Bytes of P of one layer in float64."""
    return samples * arch.heads * tokens**2 * 8

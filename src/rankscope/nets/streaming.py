"""Long contexts: attention a block of rows at a time, so that no `[head, token, token]` is held.

The rules are the plain ones. In the place of P stand numbers of it, those that are asked for; where none is,
torch's fused attention takes the place of the rows as well.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from rankscope.metrics.attention import defect_of_rows, entropy_of_rows, first_token_of_rows
from rankscope.metrics.rows import PatternRows
from rankscope.nets.architecture import Architecture
from rankscope.nets.kernels import kernel_of
from rankscope.nets.masks import spec_of
from rankscope.nets.padding import TokenOrder
from rankscope.nets.parts import pieces
from rankscope.nets.pass_settings import PassSettings
from rankscope.nets.plain import Heads, Plain, Spoken, Tokens
from rankscope.nets.positions import by_offset, score_bias
from rankscope.nets.rows import AttentionRows, SoftmaxRows
from rankscope.nets.steps import Step
from rankscope.nets.transformer import Transformer
from rankscope.nets.traversal import Block
from rankscope.shapes import Float

AT_ONCE = {"cpu": 2**23, "cuda": 2**28}
"""Bytes of a block of rows: of one head what a processor's cache holds; of all heads elsewhere."""


@dataclass(frozen=True)
class AttentionRequest:
    """What is asked of attention, by name."""

    by_row: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = field(default_factory=dict)
    """Of rows of P `[batch, head, row, token]`, and of which tokens count `[batch, 1, token]`: a number for
    each row."""
    by_head: Mapping[str, Callable[[PatternRows], Tensor]] = field(default_factory=dict)
    """Of P, whose rows are made as often as they are asked for: a number for each head."""

    def __bool__(self) -> bool:
        return bool(self.by_row or self.by_head)


@dataclass
class PatternNumbers:
    """What is known of P."""

    rows: AttentionRows | None
    """What it is made of; None when that is done."""
    of_rows: dict[str, Float[Tensor, "batch head token"]] = field(default_factory=dict)
    """By name, float64."""
    of_heads: dict[str, Float[Tensor, "batch head"]] = field(default_factory=dict)

    def restored(self, order: TokenOrder) -> "PatternNumbers":
        """Tokens back where they stood."""
        back = {name: order.restored_columns(numbers_by_row) for name, numbers_by_row in self.of_rows.items()}
        return replace(self, of_rows=back)


def streams(arch: Architecture) -> bool:
    """Whether rows of attention can be taken one block at a time: no part of one's own changes P, or asks who
    sees whom, and scores do not follow the number of tokens."""
    whole = any(part.place == "pattern" or getattr(part, "sees", False) for part in pieces(arch.parts))
    return kernel_of(arch.kernel).by_row and not arch.log_gain and not whole


class StreamedPlain(Plain):
    """Plain rules, attention by blocks of rows."""

    def __init__(self, net: Transformer, settings: PassSettings, asked: AttentionRequest) -> None:
        super().__init__(net.arch, settings)
        self.net, self.asked = net, asked
        self.all_valid = bool(settings.valid.all())

    def pattern(self, block: Block, X: Tokens) -> PatternNumbers:  # type: ignore[override]
        """Queries and keys: rows are made as they are mixed."""
        q, k, added = self.scored(block, X)
        mask = self.arch.mask_of(block.index)
        simple = self.all_valid and mask in ("complete", "causal")
        rows = AttentionRows(
            self.arch, q, k,
            visible=None if simple else partial(self.settings.rows, mask),
            behind="causal" in spec_of(mask).split("&"),
            added=self._rows_added(block, added),
        )  # fmt: skip
        return PatternNumbers(rows)

    def added(self, block: Block, q: Heads) -> Tensor | None:
        """Return the queries that meet relative positions (Transformer-XL); what they add is made by rows."""
        bias = block.weights.attention.position_bias
        return None if self.settings.sinusoids is None or bias is None else q + bias[:, None]

    def _rows_added(self, block: Block, queries: Tensor | None) -> Callable[[slice, int, int], Tensor] | None:
        arch, settings = self.arch, self.settings
        if queries is not None:
            w, sinusoids = block.weights.attention, settings.sinusoids
            assert sinusoids is not None
            return lambda heads, start, stop: (
                by_offset(queries[:, heads, start:stop], w, sinusoids, heads, start) / arch.divisor
            )
        if arch.positions not in ("bias", "alibi"):
            return None
        n, like = settings.valid.shape[1], block.weights.attention.query.weight

        def bias(heads: slice, start: int, stop: int) -> Tensor:
            numbers = score_bias(arch, self.net.weights, n, like, start, stop)
            assert numbers is not None
            return numbers[heads]

        return bias

    def mix(self, block: Block, P: PatternNumbers, V: Heads) -> Spoken:  # type: ignore[override]
        """`P_h V_h` of every head, and the numbers of P on the way."""
        rows, P.rows = P.rows, None
        assert rows is not None
        heads = self._said(rows, V, P)
        valid = self.settings.valid
        if self.asked.by_head:
            lazily = PatternRows(len(V), V.shape[1], rows.whole_rows, valid)
            P.of_heads = {name: reading(lazily) for name, reading in self.asked.by_head.items()}
        return self.heard(block, heads)

    def cross(self, block: Block, X: Tokens) -> Tokens:
        """Queries of the tokens, keys and values of the memory, by rows too."""
        crossing, M = block.crossing, self.settings.memory
        assert M is not None
        w = crossing.weights.attention
        rows = AttentionRows(
            self.arch, self.heads(X, w.query), self._grouped(self.heads(M.tokens, w.key)),
            visible=None if self.all_valid and bool(M.valid.all())
            else lambda start, stop: M.visible(self.settings.valid[:, start:stop]),
            behind=False,
        )  # fmt: skip
        return self.output(
            crossing, self.heard(crossing, self._said(rows, self.values(crossing, M.tokens), None))
        )

    def _said(
        self, rows: AttentionRows, V: Heads, P: PatternNumbers | None
    ) -> Float[Tensor, "batch head row head_width"]:
        """`P V`; numbers of rows into P, where it is given."""
        wanted = self.asked.by_row if P is not None else {}
        q = rows.q
        if not wanted and rows.fused:
            return F.scaled_dot_product_attention(
                q, rows.k, V, is_causal=rows.behind, scale=1 / self.arch.divisor
            )
        batch, heads, n = q.shape[:3]
        together = 1 if q.device.type == "cpu" else heads
        room = AT_ONCE.get(q.device.type, AT_ONCE["cuda"])
        step = max(1, room // max(1, batch * together * V.shape[2] * q.element_size()))
        outputs = q.new_empty(*q.shape[:-1], V.shape[-1])
        numbers = {name: q.new_empty(q.shape[:-1], dtype=torch.float64) for name in wanted}
        everyone = slice(0, batch)
        for start in range(0, n, step):
            stop = min(n, start + step)
            seen = rows.seen(stop)
            valid = self.settings.valid[:, None, :seen]
            for head in range(0, heads, together):
                some_heads = slice(head, head + together)
                values = V[:, some_heads, :seen]
                part: SoftmaxRows | Tensor
                if rows.is_softmax:
                    entropy = entropy_of_rows in wanted.values()
                    part = rows.softmaxed(everyone, some_heads, start, stop, entropy)
                else:
                    part = rows.pattern(everyone, some_heads, start, stop)
                outputs[:, some_heads, start:stop] = _averaged(part, values)
                for name, reading in wanted.items():
                    numbers[name][:, some_heads, start:stop] = _number(part, reading, valid)
        if P is not None:
            P.of_rows = numbers
        return outputs


def _averaged(part: SoftmaxRows | Tensor, V: Heads) -> Float[Tensor, "batch head row head_width"]:
    if not isinstance(part, SoftmaxRows):
        return part @ V
    if part.e.dtype != V.dtype:  # weights are rounded as a model in half precision rounds them
        return (part.e / part.total[..., None]).to(V.dtype) @ V
    return (part.e @ V) / part.total[..., None]


def _number(part: SoftmaxRows | Tensor, reading: Callable[[Tensor, Tensor], Tensor], valid: Tensor) -> Tensor:
    """A number of rows; those that are known of a softmax need no weights."""
    if not isinstance(part, SoftmaxRows):
        return reading(part, valid)
    if reading is entropy_of_rows and part.entropy is not None:
        return part.entropy
    if reading is first_token_of_rows:  # real tokens stand first
        return part.e[..., 0] / part.total
    if reading is defect_of_rows:  # they are divided by their sum: 0, or NaN
        return part.total / part.total - 1
    return reading(part.e / part.total[..., None], valid)


def streamed(
    net: Transformer, X: Tensor, padding: Tensor | None, asked: AttentionRequest
) -> Iterator[tuple[Step, PatternNumbers | None]]:
    """`net.steps`, with numbers of attention in the place of attention."""
    X, valid, order = net.prepared(X, padding)
    settings = PassSettings.of(net.arch, net.weights, X, valid, net.memory, whole_masks=False)
    yield Step(0, X if order is None else order.restored(X), None), None
    for step in net.traversed(X, valid, StreamedPlain(net, settings, asked)):
        numbers: PatternNumbers = step.attention  # type: ignore[assignment]
        step = step._replace(attention=None)
        if order is not None:
            step, numbers = step.restored(order), numbers.restored(order)
        yield step, numbers


def size_of_attention(arch: Architecture, samples: int, tokens: int) -> int:
    """Bytes of P of one layer in float64."""
    return samples * arch.heads * tokens**2 * 8

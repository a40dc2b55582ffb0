"""Attention of a state by blocks of rows, for contexts whose `[head, token, token]` does not fit into memory.

`propagate(..., by_rows=True)` takes the rules of `StreamedDeviation`, whose `pattern` is a `PatternByRows`.
The formulas are those of `scores.py` and `softmax.py`. What they need of all rows together is found in a
first sweep over blocks of D (`PatternByRows.of`): how large its entries are, which row is the reference row,
which columns are visible to any row, and whether all rows see the same. With it a row of `P - 1 p^T` needs no
other row: a second sweep (`delta_times`, `times`) makes them, multiplies them with the values, and drops
them. Each block has a scale of its own until its products are put together.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from rankscope.deviation.attention import EVERY, Logits, Pattern, Visible, largest_score, with_top_column
from rankscope.deviation.cap import CapReference
from rankscope.deviation.rules import Deviation
from rankscope.deviation.scores import ScoreParts
from rankscope.deviation.softmax import ReferenceRow
from rankscope.deviation.state import LOWEST, STEEPEST, LogScales, Scaled, State, ValidTokens
from rankscope.metrics import PatternRows
from rankscope.nets import Block, PassSettings, TokenOrder, Transformer, score_bias
from rankscope.shapes import Bool, Float, Int

AT_ONCE = {"cpu": 2**22, "cuda": 2**28}  # bytes of a block of rows of all heads, by device


@dataclass(frozen=True, eq=False)
class RowMaker:
    """Makes rows of scores, and of the mask, each time they are asked for."""

    scores: ScoreParts
    sees: Callable[[slice], Visible]  # gives the columns visible to some rows
    valid: ValidTokens  # which rows are tokens
    tokens: bool = True  # True if columns are the same tokens, of which only valid ones count; False for a memory
    perturb: Callable[[Tensor, int], Tensor] | None = None
    """Moves the last digits of rows of D, given their first row: the same each time they are made."""
    cap_reference: CapReference | None = None  # what rows have in common, if scores are capped
    block_bytes: int | None = None  # bytes of a block of rows of all heads; None takes `AT_ONCE`

    def blocks(self) -> Iterator[slice]:
        """Slices that cover all rows, each of as many as `block_bytes` allows."""
        n = self.valid.mask.shape[1]
        batch, heads, columns = self.scores.ref.value.shape
        most_bytes = self.block_bytes or AT_ONCE.get(self.valid.mask.device.type, AT_ONCE["cuda"])
        step = max(1, most_bytes // max(1, 8 * batch * heads * columns))
        for start in range(0, n, step):
            yield slice(start, min(n, start + step))

    def D(self, rows: slice) -> Scaled:
        """Some rows of the scores D, at a scale of their own."""
        D, perturb = self.scores.scores(rows, self.cap_reference).D, self.perturb
        return D if perturb is None else D.mapped(lambda t: perturb(t, rows.start))

    def visible(self, rows: slice) -> Visible:
        """The columns visible to some rows, for every sample."""
        return self.sees(rows).expand(len(self.valid.mask), -1, -1, -1)

    def valid_rows(self, rows: slice) -> ValidTokens:
        """Which of some rows are tokens."""
        return ValidTokens(self.valid.mask[:, rows])

    def narrowed(self, sample: slice, head: slice) -> "RowMaker":
        """A maker of the same rows for some samples and heads alone."""
        return replace(
            self,
            scores=self.scores.narrowed(sample, head),
            sees=lambda rows: self.visible(rows)[sample],
            valid=ValidTokens(self.valid.mask[sample]),
            cap_reference=self.cap_reference and self.cap_reference.narrowed(sample, head),
        )


class _SmallestRow(NamedTuple):
    """The row of D whose entries are smallest, of the rows that were swept so far: the reference row."""

    size: Float[Tensor, "batch head 1"]
    log: LogScales  # the log-scale of `size` and of `scores`
    scores: Float[Tensor, "batch head token"]
    seen: Bool[Tensor, "batch head token"]

    @classmethod
    def of(cls, maker: RowMaker, rows: slice, D: Scaled, visible: Visible) -> "_SmallestRow":
        """The valid row of D, among these `rows`, whose largest entry is least in size, with the columns it sees."""
        valid, columns = maker.valid, maker.valid.mask[:, None, None]
        values = D.value if valid.all or not maker.tokens else D.value.masked_fill(~columns, 0.0)
        size = torch.maximum(values.amax(-1), -values.amin(-1))  # [batch, head, row]
        size, row = size.masked_fill(~valid.mask[:, None, rows], torch.inf).min(-1, keepdim=True)
        at = row[..., None].expand(-1, -1, 1, D.value.shape[3])
        seen = visible.expand(-1, D.value.shape[1], -1, -1).gather(2, at)[:, :, 0]
        return cls(size, D.log, D.value.gather(2, at)[:, :, 0], seen)

    def or_(self, other: "_SmallestRow") -> "_SmallestRow":
        """The smaller of two rows; of equals the first."""
        log = torch.maximum(self.log, other.log)
        better = Scaled(other.size, other.log).at(log) < Scaled(self.size, self.log).at(log)
        parts = (torch.where(better, b, a) for a, b in zip(self[2:], other[2:], strict=True))
        logs = torch.where(better[..., 0], other.log, self.log)
        return _SmallestRow(torch.where(better, other.size, self.size), logs, *parts)


@dataclass(frozen=True, eq=False)
class PatternByRows(Pattern):
    """The pattern `P = 1 p^T + Delta` of a layer, of which only p is held; valid tokens come first."""

    maker: RowMaker
    shared: ReferenceRow
    reference: Scaled  # [batch, head, token]
    """The reference row of D, at the scale that all rows of D are brought to; zero in `D(rows)`."""

    @classmethod
    def of(cls, maker: RowMaker, perturb: Callable[[Scaled], Scaled] | None = None) -> "PatternByRows":
        """The pattern of rows of scores, by a sweep over them; `perturb` moves the last digits of ref and D's scale."""
        maker = replace(maker, cap_reference=maker.scores.cap_reference(maker.blocks()))
        smallest: _SmallestRow | None = None
        log = torch.full_like(maker.scores.ref.log, LOWEST)
        alike = torch.ones_like(maker.valid.mask[:, 0])
        anyone = first = None
        for rows in maker.blocks():
            D, visible = maker.D(rows), maker.visible(rows)
            row = _SmallestRow.of(maker, rows, D, visible)
            smallest, log = row if smallest is None else smallest.or_(row), torch.maximum(log, D.log)
            anyone = visible.any(2) if anyone is None else anyone | visible.any(2)
            first = visible[:, :, :1] if first is None else first  # valid where any is
            same = (visible == first).all(-1)[:, 0] | ~maker.valid.mask[:, rows]
            alike = alike & same.all(-1)
        assert smallest is not None and anyone is not None
        ref = maker.scores.scores(slice(0, 1), maker.cap_reference).ref
        reference = Scaled(Scaled(smallest.scores, smallest.log).at(log), log)
        if perturb is not None:
            ref, reference = perturb(ref), Scaled(reference.value, perturb(reference).log)
        ref = (ref + reference).normalised()
        # Beyond e^600 only which score is largest matters: cut both alike.
        cut = (torch.maximum(ref.log, reference.log) - STEEPEST).clamp(min=0.0)
        alike = alike[:, None].expand_as(log)
        shared = ReferenceRow.of(ref.at(cut), reference.log - cut, smallest.seen[:, :, None], anyone, alike)
        return cls(maker, shared, Scaled(reference.value, log))

    @property
    def p(self) -> Float[Tensor, "batch head token"]:  # type: ignore[override]
        """The reference row of P."""
        return self.shared.p

    @property
    def top(self) -> Int[Tensor, "batch head 1"]:  # type: ignore[override]
        """j*, the column of the largest entry of p."""
        return self.shared.top

    def visible_blocks(self) -> Iterator[Visible]:
        """What each row sees, block by block."""
        return map(self.maker.visible, self.maker.blocks())

    def restored(self, order: TokenOrder, *, of_memory: bool = False) -> "PatternByRows":
        """The pattern as it is: valid tokens stay first."""
        return self

    def D(self, rows: slice) -> Float[Tensor, "batch head row token"]:
        """Some rows of D minus the reference row, in units of e^(`shared.log`)."""
        return self.maker.D(rows).at(self.reference.log) - self.reference.value[:, :, None]

    def off_top(self, rows: slice) -> Scaled:
        """Some rows of Delta without column j*, at a scale of their own."""
        return self.shared.off_top(self.D(rows), self.maker.visible(rows), self.maker.valid_rows(rows))

    def logits(self, rows: slice) -> Logits:
        """The scores that some rows of P are the softmax of."""
        return Logits(self.shared.ref, Scaled(self.D(rows), self.shared.log))

    def matrix(self, rows: slice = EVERY) -> Float[Tensor, "batch head row token"]:
        """The pattern P as an ordinary tensor, or some rows of it."""
        return self.logits(rows).softmax(self.maker.visible(rows))

    def delta_times(self, V: Float[Tensor, "batch head token width"]) -> Scaled:
        """The product `Delta V`, block by block; notes `largest` and `log` on the way."""
        blocks, output = list(self.maker.blocks()), self._like_rows(V.shape[-1])
        # One tensor for all blocks: small ones kept for each would fragment the memory that blocks free.
        sizes, logs, scales = self.shared.log.new_empty(3, len(blocks), *self.shared.log.shape)
        for index, rows in enumerate(blocks):
            D = self.D(rows)
            Delta = self.shared.off_top(D, self.maker.visible(rows), self.maker.valid_rows(rows))
            sizes[index] = Scaled(D, self.shared.log).log_size()
            logs[index] = Delta.log_size()
            product = Scaled(Delta.value @ V, Delta.log).normalised()
            output[:, :, rows], scales[index] = product.value, product.log
        vars(self).update(largest=sizes.amax(0), log=logs.amax(0))  # the cached properties
        log = scales.amax(0)
        for rows, scale in zip(blocks, scales, strict=True):
            output[:, :, rows] = Scaled(output[:, :, rows], scale).at(log)
        return Scaled(output, log)

    def _like_rows(self, *shape: int) -> Tensor:
        """An empty tensor `[batch, head, row, *shape]`."""
        like = self.shared.ref
        return like.new_empty(*like.shape[:2], self.maker.valid.mask.shape[1], *shape)

    @cached_property
    def largest(self) -> LogScales:
        """The log of the largest |entry| of D, by head."""
        return self._most(lambda rows: Scaled(self.D(rows), self.shared.log).log_size())

    @cached_property
    def log(self) -> LogScales:
        """A log-scale of Delta by head: the log of its largest |entry| outside column j*."""
        return self._most(lambda rows: self.off_top(rows).log_size())

    def farthest(self, compute: Callable[[slice], Tensor]) -> Float[Tensor, "batch head"]:
        """The largest number over all rows, where `compute` gives `[batch, head, row, token]` of some rows."""
        return self._most(lambda rows: compute(rows).amax((-2, -1)))

    def _most(self, compute: Callable[[slice], Tensor]) -> Float[Tensor, "batch head"]:
        return torch.stack([compute(rows) for rows in self.maker.blocks()]).amax(0)

    @property
    def score_sizes(self) -> tuple[LogScales, LogScales]:
        """(largest |ref|, log of the largest |D|) of each head's scores `ref_j + D_ij`."""
        return largest_score(self.shared.ref), self.largest

    def log_matrix(self, rows: slice) -> Float[Tensor, "batch head row token"]:
        """Some rows of log P as an ordinary tensor."""
        return self.logits(rows).log_softmax(self.maker.visible(rows))

    @property
    def largest_before_cap(self) -> LogScales | None:
        """The log of the largest part of a score before the cap, in caps, by head; None if there is no cap."""
        reference = self.maker.cap_reference
        return None if reference is None else reference.largest - math.log(self.maker.scores.arch.score_cap)

    def deciding(self, rows: slice) -> Float[Tensor, "batch head row token"]:
        """Some rows of what `DeviationPattern.deciding` gives."""
        before_cap = self.maker.scores.before_cap(rows)
        if before_cap is None:
            return self.log_matrix(rows)
        return before_cap.explicit().masked_fill(~self.maker.visible(rows), 0.0)

    def of_rows(self, compute: Callable[[slice], Tensor], *shape: int) -> Float[Tensor, "batch head row ..."]:
        """Numbers of all rows, where `compute` gives `[batch, head, row, *shape]` of some."""
        output = self._like_rows(*shape)
        for rows in self.maker.blocks():
            output[:, :, rows] = compute(rows)
        return output

    def Delta(self, rows: slice) -> Float[Tensor, "batch head row token"]:
        """Some rows of `P - 1 p^T`, in units of e^log."""
        return with_top_column(self.off_top(rows), self.top).at(self.log)

    def narrowed(self, sample: slice, head: slice) -> "PatternByRows":
        """The pattern of some samples and heads alone."""
        part = replace(
            self,
            maker=self.maker.narrowed(sample, head),
            shared=ReferenceRow(*(part[sample, head] for part in self.shared)),
            reference=self.reference[sample, head],
        )
        if "log" in vars(self):
            vars(part)["log"] = self.log[sample, head]
        return part

    def by_head(self, make: Callable[["PatternByRows", slice], Tensor]) -> PatternRows:
        """Rows as metrics read them, made when they are asked for: `make` gets this pattern narrowed to one head of one
        sample, and which rows, and gives `[1, 1, row, token]`. The last narrowed pattern is kept."""
        kept: dict[tuple[int, int], PatternByRows] = {}

        def of_head(sample: int, head: int, start: int, stop: int) -> Tensor:
            if (sample, head) not in kept:
                kept.clear()
                kept[sample, head] = self.narrowed(slice(sample, sample + 1), slice(head, head + 1))
            return make(kept[sample, head], slice(start, stop))[0, 0]

        batch, heads = self.shared.log.shape
        return PatternRows(batch, heads, of_head, self.maker.valid.mask)


class StreamedDeviation(Deviation):
    """Deviation arithmetic with attention by blocks of rows."""

    def __init__(self, net: Transformer, settings: PassSettings, block_bytes: int | None = None) -> None:
        """The settings have no masks; a block of rows takes `block_bytes`, if given."""
        super().__init__(net.arch, settings)
        self.table, self.block_bytes = net.weights, block_bytes

    def pattern(self, block: Block, state: State) -> PatternByRows:  # type: ignore[override]
        """The pattern, of which only the shared row is held: its rows are made as they are used."""
        mask, settings = self.arch.mask_of(block.index), self.settings
        scores = self.score_parts(block, state, self._bias(block))
        return self.rows(RowMaker(scores, lambda rows: settings.rows(mask, rows.start, rows.stop), state.valid))

    def cross_pattern(self, cross_block: Block, state: State) -> PatternByRows:  # type: ignore[override]
        """The pattern of the tokens' attention to the memory, of which only the shared row is held."""
        memory, valid = self.settings.memory, state.valid
        assert memory is not None
        scores = self.score_parts(cross_block, state, source=self.source)
        return self.rows(RowMaker(scores, lambda rows: memory.visible(valid.mask[:, rows]), valid, tokens=False))

    def rows(self, maker: RowMaker) -> PatternByRows:
        """The pattern of these rows of scores."""
        return PatternByRows.of(replace(maker, block_bytes=self.block_bytes))

    def _bias(self, block: Block) -> Callable[[slice], Tensor] | None:
        """A function that makes rows of the positions' bias on scores; None if there is no such bias."""
        if self.arch.positions not in ("bias", "alibi"):
            return None
        n, like = self.settings.valid.shape[1], block.weights.attention.query.weight
        bias = partial(score_bias, self.arch, self.table, n, like)
        return lambda rows: bias(rows.start, rows.stop)

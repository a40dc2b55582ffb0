"""Attention of a state by blocks of rows, for contexts whose `[head, token, token]` does not fit into memory.

The rules are those of `scores.py` and `softmax.py`. What they ask of all rows together is found in a first
sweep over blocks of D: how large its entries are, which row is the reference row, who is seen by anyone, and
whether all see alike. With it a row of `P - 1 p^T` needs no other row: a second sweep makes them, multiplies
them with the values, and lets them go. Each block has a scale of its own until its products are put together.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from rankscope.deviation.attention import Logits, Visible, completed
from rankscope.deviation.scaled import LOWEST, STEEPEST, LogScales, Scaled, spread
from rankscope.deviation.scores import ScoreParts
from rankscope.deviation.softmax import ReferenceRow
from rankscope.deviation.state import ValidTokens
from rankscope.metrics.rows import PatternRows
from rankscope.shapes import Bool, Float, Int

AT_ONCE = {"cpu": 2**22, "cuda": 2**28}
"""Bytes of a block of rows of all heads."""


@dataclass(frozen=True, eq=False)
class RowMaker:
    """Rows of scores, and of whom they see, made as often as they are asked for."""

    scores: ScoreParts
    sees: Callable[[slice], Visible]
    """Whom some rows see."""
    valid: ValidTokens
    """Rows that count."""
    tokens: bool = True
    """Whether columns are tokens, of which only valid ones count."""
    perturb: Callable[[Tensor, int], Tensor] | None = None
    """What is done to rows that begin at some row, the same every time."""
    largest: LogScales | None = None
    """The log of the largest part of a score, where there is a cap."""

    def blocks(self) -> Iterator[slice]:
        """All rows, so many at once as fit."""
        n = self.valid.mask.shape[1]
        batch, heads, columns = self.scores.ref.value.shape
        room = AT_ONCE.get(self.valid.mask.device.type, AT_ONCE["cuda"])
        step = max(1, room // max(1, 8 * batch * heads * columns))
        for start in range(0, n, step):
            yield slice(start, min(n, start + step))

    def D(self, rows: slice) -> Scaled:
        """Some rows of D, at a scale of their own."""
        D, perturb = self.scores.scores(rows, self.largest).D, self.perturb
        return D if perturb is None else D.mapped(lambda t: perturb(t, rows.start))

    def visible(self, rows: slice) -> Visible:
        """Whom they see, of every sample."""
        return self.sees(rows).expand(len(self.valid.mask), -1, -1, -1)

    def counted(self, rows: slice) -> ValidTokens:
        """Which of them count."""
        return ValidTokens(self.valid.mask[:, rows])

    def narrowed(self, sample: slice, head: slice) -> "RowMaker":
        """Of some samples and heads."""
        return replace(
            self,
            scores=self.scores.narrowed(sample, head),
            sees=lambda rows: self.visible(rows)[sample],
            valid=ValidTokens(self.valid.mask[sample]),
            largest=None if self.largest is None else self.largest[sample, head],
        )


class _SmallestRow(NamedTuple):
    """The row whose scores are smallest, of the rows that were looked at."""

    size: Float[Tensor, "batch head 1"]
    log: LogScales
    """Of its size and of its scores."""
    scores: Float[Tensor, "batch head token"]
    seen: Bool[Tensor, "batch head token"]

    @classmethod
    def of(cls, maker: RowMaker, rows: slice, D: Scaled, visible: Visible) -> "_SmallestRow":
        """Of some rows."""
        valid, columns = maker.valid, maker.valid.mask[:, None, None]
        counted = D.value if valid.all or not maker.tokens else D.value.masked_fill(~columns, 0.0)
        size = torch.maximum(counted.amax(-1), -counted.amin(-1))  # [batch, head, row]
        size, row = size.masked_fill(~valid.mask[:, None, rows], torch.inf).min(-1, keepdim=True)
        at = row[..., None].expand(-1, -1, 1, D.value.shape[3])
        seen = visible.expand(-1, D.value.shape[1], -1, -1).gather(2, at)[:, :, 0]
        return cls(size, D.log, D.value.gather(2, at)[:, :, 0], seen)

    def or_(self, other: "_SmallestRow") -> "_SmallestRow":
        """Of two the smaller, of equals the first."""
        log = torch.maximum(self.log, other.log)
        one, two = (Scaled(each.size, each.log).at(log) for each in (self, other))
        better = two < one
        parts = (torch.where(better, b, a) for a, b in zip(self[2:], other[2:], strict=True))
        logs = torch.where(better[..., 0], other.log, self.log)
        return _SmallestRow(torch.where(better, other.size, self.size), logs, *parts)


@dataclass(frozen=True, eq=False)
class PatternByRows:
    """The pattern `P = 1 p^T + Delta` of a layer, of which only p is held; valid tokens come first."""

    maker: RowMaker
    shared: ReferenceRow
    reference: Scaled  # [batch, head, token]
    """The reference row of D, at the scale that all rows of D are brought to."""
    signed: bool = False

    @classmethod
    def of(cls, maker: RowMaker, touch: Callable[[Scaled], Scaled] | None = None) -> "PatternByRows":
        """What rows share, by a sweep over them; `touch` is asked of ref and of the scale of D."""
        if maker.scores.arch.score_cap and maker.scores.products:
            sizes = [maker.scores.uncapped(rows).log_size() for rows in maker.blocks()]
            maker = replace(maker, largest=maker.scores.largest(torch.stack(sizes).amax(0)))
        found: _SmallestRow | None = None
        log = torch.full_like(maker.scores.ref.log, LOWEST)
        alike = torch.ones_like(maker.valid.mask[:, 0])
        anyone = first = None
        for rows in maker.blocks():
            D, visible = maker.D(rows), maker.visible(rows)
            here = _SmallestRow.of(maker, rows, D, visible)
            found, log = here if found is None else found.or_(here), torch.maximum(log, D.log)
            anyone = visible.any(2) if anyone is None else anyone | visible.any(2)
            first = visible[:, :, :1] if first is None else first  # valid where any is
            same = (visible == first).all(-1)[:, 0] | ~maker.valid.mask[:, rows]
            alike = alike & same.all(-1)
        assert found is not None and anyone is not None
        ref = maker.scores.scores(slice(0, 1), maker.largest).ref
        of_all = Scaled(Scaled(found.scores, found.log).at(log), log)
        if touch is not None:
            ref, of_all = touch(ref), Scaled(of_all.value, touch(of_all).log)
        ref = (ref + of_all).normalised()
        # Beyond e^600 only which score is largest matters: cut both alike.
        cut = (torch.maximum(ref.log, of_all.log) - STEEPEST).clamp(min=0.0)
        alike = alike[:, None].expand_as(log)
        shared = ReferenceRow.of(ref.at(cut), of_all.log - cut, found.seen[:, :, None], anyone, alike)
        return cls(maker, shared, Scaled(of_all.value, log))

    @property
    def p(self) -> Float[Tensor, "batch head token"]:
        """What all rows share."""
        return self.shared.p

    @property
    def top(self) -> Int[Tensor, "batch head 1"]:
        """j*, its largest entry."""
        return self.shared.top

    def D(self, rows: slice) -> Float[Tensor, "batch head row token"]:
        """Some rows of D about the reference row, in units of `shared.log`."""
        return self.maker.D(rows).at(self.reference.log) - self.reference.value[:, :, None]

    def others(self, rows: slice) -> Scaled:
        """Some rows of Delta but for column j*, at a scale of their own."""
        return self.shared.others(self.D(rows), self.maker.visible(rows), self.maker.counted(rows))

    def logits(self, rows: slice) -> Logits:
        """What some rows of P are the softmax of."""
        return Logits(self.shared.ref, Scaled(self.D(rows), self.shared.log))

    def matrix(self, rows: slice) -> Float[Tensor, "batch head row token"]:
        """Some rows of P."""
        return self.logits(rows).softmax(self.maker.visible(rows))

    def differenced(self, V: Float[Tensor, "batch head token width"]) -> Scaled:
        """`Delta V` of what has zeros in row j*."""
        blocks, said = list(self.maker.blocks()), self._like_rows(V.shape[-1])
        # One place for all: what is kept of each block would stand between what is let go of.
        sizes, logs, scales = self.shared.log.new_empty(3, len(blocks), *self.shared.log.shape)
        for number, rows in enumerate(blocks):
            D = self.D(rows)
            others = self.shared.others(D, self.maker.visible(rows), self.maker.counted(rows))
            sizes[number] = Scaled(D, self.shared.log).log_size()
            logs[number] = others.log_size()
            here = Scaled(others.value @ V, others.log).normalised()
            said[:, :, rows], scales[number] = here.value, here.log
        vars(self).update(largest=sizes.amax(0), log=logs.amax(0))  # on the way
        log = scales.amax(0)
        for rows, scale in zip(blocks, scales, strict=True):
            said[:, :, rows] = Scaled(said[:, :, rows], scale).at(log)
        return Scaled(said, log)

    def _like_rows(self, *shape: int) -> Tensor:
        like = self.shared.ref
        return like.new_empty(*like.shape[:2], self.maker.valid.mask.shape[1], *shape)

    def averaged(self, V: Float[Tensor, "batch head token width"]) -> Float[Tensor, "batch head row width"]:
        """`P V`."""
        said = self._like_rows(V.shape[-1])
        for rows in self.maker.blocks():
            said[:, :, rows] = self.matrix(rows) @ V
        return said

    @cached_property
    def largest(self) -> LogScales:
        """The log of the largest entry of D."""
        sizes = [Scaled(self.D(rows), self.shared.log).log_size() for rows in self.maker.blocks()]
        return torch.stack(sizes).amax(0)

    @cached_property
    def log(self) -> LogScales:
        """A log-scale of Delta, head by head: that of its largest entry but for column j*."""
        return torch.stack([self.others(rows).log_size() for rows in self.maker.blocks()]).amax(0)

    def farthest(self, number: Callable[[slice], Tensor]) -> Float[Tensor, "batch head"]:
        """The largest of numbers `[batch, head, row, token]` of some rows, of all rows."""
        return torch.stack([number(rows).amax((-2, -1)) for rows in self.maker.blocks()]).amax(0)

    def log_matrix(self, rows: slice) -> Float[Tensor, "batch head row token"]:
        """Some rows of log P."""
        return self.logits(rows).log_softmax(self.maker.visible(rows))

    def of_rows(self, number: Callable[[slice], Tensor]) -> Float[Tensor, "batch head row"]:
        """Numbers of some rows, of all rows."""
        found = self._like_rows()
        for rows in self.maker.blocks():
            found[:, :, rows] = number(rows)
        return found

    def Delta(self, rows: slice) -> Float[Tensor, "batch head row token"]:
        """Some rows of `P - 1 p^T`, in units of e^log."""
        return completed(self.others(rows), self.top).at(self.log)

    def narrowed(self, sample: slice, head: slice) -> "PatternByRows":
        """Of some samples and heads."""
        found = replace(
            self,
            maker=self.maker.narrowed(sample, head),
            shared=ReferenceRow(*(part[sample, head] for part in self.shared)),
            reference=Scaled(self.reference.value[sample, head], self.reference.log[sample, head]),
        )
        if "log" in vars(self):
            vars(found)["log"] = self.log[sample, head]
        return found

    def by_head(self, make: Callable[["PatternByRows", slice], Tensor]) -> PatternRows:
        """Rows of one head of one sample at a time, as `make` gives them."""
        kept: dict[tuple[int, int], PatternByRows] = {}

        def of_head(sample: int, head: int, start: int, stop: int) -> Tensor:
            if (sample, head) not in kept:
                kept.clear()
                kept[sample, head] = self.narrowed(slice(sample, sample + 1), slice(head, head + 1))
            return make(kept[sample, head], slice(start, stop))[0, 0]

        batch, heads = self.shared.log.shape
        return PatternRows(batch, heads, of_head, self.maker.valid.mask)


def distance_of_rows(one: PatternByRows, other: PatternByRows) -> Float[Tensor, "batch head"]:
    """How far Delta of two passes is apart, as `witness.distance` has it of what tokens differ by: about its
    mean row, as a direction and as a log. The row that it is written about may be another in each."""
    valid, both = one.maker.valid, (one, other)
    number = valid.count[..., None]
    means = [sum(P.Delta(rows).sum(2) for rows in P.maker.blocks()) / number for P in both]

    def centred(which: int, rows: slice) -> Tensor:
        counted = valid.mask[:, None, rows, None]
        return (both[which].Delta(rows) - means[which][:, :, None]).masked_fill(~counted, 0.0)

    norms = [
        torch.stack([centred(k, rows).square().sum((-2, -1)) for rows in P.maker.blocks()]).sum(0).sqrt()
        for k, P in enumerate(both)
    ]
    safe = [spread(norm.masked_fill(norm == 0, 1.0), means[0][..., None]) for norm in norms]
    turned = torch.stack(
        [
            (centred(0, rows) / safe[0] - centred(1, rows) / safe[1]).square().sum((-2, -1))
            for rows in one.maker.blocks()
        ]
    ).sum(0).sqrt()  # fmt: skip
    logs = [P.log + near.flatten(2)[..., 0].log() for P, near in zip(both, safe, strict=True)]
    deep = (logs[0].abs() / 1e3).clamp(min=1.0)
    found = torch.maximum(turned, (logs[0] - logs[1]).abs()) / deep
    return found.nan_to_num(nan=torch.inf, posinf=torch.inf)

"""The softmax of a state's scores, split into the row that all rows of P share and what they do not.

`split` is called by `rules.py` for attention, `split_columns` by `experts.py` for routing, `ReferenceRow` by
`by_rows.py`; the scores come from `scores.py`, the `DeviationPattern` goes to `attention.py`.

The scores are `ref_j + D_ij`, zero in D at the reference row (`scores.py`). Let p be that row of P, j* its largest
entry, `w_j = ref_j - log sum_{j seen} e^{ref_j}` the log of p where the reference row sees j, and D_ij* = 0 in every
row (one more constant along rows). Then P_ij = e^{w_j + D_ij} / S_i with

    S_i = sum_{j seen by i} e^{w_j + D_ij} = 1 + m_i,    P_ij - p_j = p_j expm1(D_ij - log S_i),

where m_i has p_j expm1(D_ij) for columns visible to both rows, e^{w_j + D_ij} for those visible to row i alone, -p_j
for those visible to the reference row alone. When e^{2s} leaves floating point's range, expm1(D) is D and 2s goes into
the scale; so does log p where p underflows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rankscope.deviation.attention import DeviationPattern, Logits, Visible
from rankscope.deviation.decisions import can_skip, must_compute, saves_a_pass
from rankscope.deviation.scores import ReferencedScores, Scores, about_reference_row
from rankscope.deviation.state import (
    LOWEST,
    STEEPEST,
    LogScales,
    Scaled,
    ValidTokens,
    chosen,
    has_kernel,
    largest_entry,
    spread,
)
from rankscope.doubled import precision
from rankscope.shapes import Bool, Float, Int

WIDEST = 4096  # the longest rows that the kernel for GPUs takes
LINEAR = 0.05  # |D| in units of the precision up to which expm1(D) is D, and one plus its mean is one
FAR = 30.0  # scores above the reference row's by more than this are formed as sums of logs


class ReferenceRow(NamedTuple):
    """What the rows of P have in common, by head: the reference row and the scales of what deviates from it."""

    ref: Float[Tensor, "batch head token"]
    log: LogScales  # the log-scale of D
    seen: Bool[Tensor, "batch head 1 token"]  # the columns visible to the reference row
    log_w: Float[Tensor, "batch head token"]  # w of the module's docstring: log p, also where this row does not see
    p: Float[Tensor, "batch head token"]
    top: Int[Tensor, "batch head 1"]
    level: LogScales  # the log-scale of Delta = P - 1 p^T

    @classmethod
    def of(
        cls, ref: Tensor, log: LogScales, seen: Tensor, anyone: Tensor, alike: Tensor, *, complete: bool = False
    ) -> "ReferenceRow":
        """The weights of the reference row.

        Args:
            ref: Its scores.
            log: The log-scale of D.
            seen: The columns that it sees.
            anyone: `[batch, 1, token]`, the columns that some row sees.
            alike: `[batch, head]`, whether all rows see the same columns.
            complete: Whether all rows see all columns.
        """
        if complete and type(ref) is Tensor and ref.shape[-1]:
            log_w = log_p = ref.log_softmax(-1)
        else:
            log_w = _log_weights(ref, seen[:, :, 0]).masked_fill(~anyone, -torch.inf)
            log_p = log_w.masked_fill(~seen[:, :, 0], -torch.inf)
        # Rows that see alike differ by D alone, at its own scale; a mask's differences are of size one.
        level = torch.where(alike, log.clamp(max=0.0), torch.zeros_like(log))
        return cls(ref, log, seen, log_w, log_p.exp(), log_p.argmax(-1, keepdim=True), level)

    def off_top(self, D: Tensor, visible: Visible, valid: ValidTokens) -> Scaled:
        """Rows of P - 1 p^T without column j*: those of the given rows of D (in units of e^log), of which
        `visible` says what they see and `valid` which are tokens."""
        change, log = self.changes(D, visible, valid)
        return Scaled(change, log[:, :, 0, 0])

    def changes(
        self, D: Tensor, visible: Visible, valid: ValidTokens, *, by_column: bool = False
    ) -> tuple[Tensor, Tensor]:
        """`off_top` as a tensor and its log-scale, `[batch, head, 1, 1]` or `by_column` `[batch, head, 1, token]`."""
        size = self.level.clamp(min=-STEEPEST).exp()  # below, expm1(D) is D and only the log goes on
        factor = (self.log - self.level).clamp(max=STEEPEST).exp()
        fused = has_kernel(D) and D.shape[-1] <= WIDEST and D.dtype == torch.float64
        if fused:
            change, log, far = self._fused(D, factor, size, visible, valid, by_column)
            if not must_compute("softmax.far_of_kernel", far):
                return change, log
        size = spread(size, D)
        U = D - D.gather(3, self.top[:, :, None].expand(-1, -1, D.shape[2], 1))
        if not saves_a_pass("softmax.unit_factor", factor, lambda: factor == 1):
            U = U.mul_(spread(factor, U))  # D in units of size, zero in column j*
        if fused or self._far(U, size, visible):
            # D as it is, not U: column j*, which is taken off in U, may be far above all that a row sees.
            log_P = Logits(self.ref, Scaled(D, self.log)).log_softmax(visible)
            change, reach = self._steep(U, size, visible, log_P, by_column)
        else:
            change, reach = self._gentle(U, size, visible, by_column)
        if not valid.all:
            change = change.masked_fill_(~valid.mask[:, None, :, None], 0.0)
        return change, spread(self.level, change) + reach

    def _fused(
        self, D: Tensor, factor: Tensor, size: Tensor, visible: Visible, valid: ValidTokens, by_column: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(`_gentle` and its log-scale by one kernel, where the answer to `_far` is yes for a valid row)."""
        from rankscope.deviation.kernels_triton import gentle_rows

        log_others, top = self.log_others, self.top[..., 0]
        reach = _reach(log_others[:, :, None], by_column)
        weight = (log_others - reach[:, :, 0]).exp()
        rows = (self.seen[:, :, 0], self.log_w, log_others, weight)
        change, far = gentle_rows(D, visible, valid.mask, *rows, top, factor, size, FAR)
        return change, spread(self.level, change) + reach, far

    @property
    def log_others(self) -> Float[Tensor, "batch head token"]:
        """w without column j*, which follows from the others."""
        return self.log_w.scatter(-1, self.top, -torch.inf)

    def _far(self, U: Tensor, size: Tensor, visible: Visible) -> bool:
        """True if some score is far above the reference row's or some row does not see j*: then `_steep` is needed.
        U is D minus its column j*, in units of `size`."""
        if not U.numel():
            return False
        if must_compute("softmax.far", (U.flatten(2).amax(-1) * size.flatten(1) > FAR)):
            return True
        if not can_skip("softmax.top_seen", _seen_at(self.top, visible)):
            return True
        if can_skip("softmax.nothing_alone", (self.seen | ~visible)):
            return False
        # What the reference row misses.
        alone = (self.log_w[:, :, None] + U * size).masked_fill(self.seen | ~visible, 0.0)
        return must_compute("softmax.far_alone", (alone.abs() > FAR))

    def _gentle(self, U: Tensor, size: Tensor, visible: Visible, by_column: bool) -> tuple[Tensor, Tensor]:
        """(Delta_ij = p_j (expm1(D_ij) - m_i) / (1 + m_i) in units of `size` and of e^reach, reach), where no score is
        far above the reference row's; arguments are those of `_far` and `changes`."""
        seen, log_others = self.seen, self.log_others
        reach = _reach(log_others[:, :, None], by_column)
        weight = (log_others[:, :, None] - reach).exp()  # e^w in units of e^reach
        complete = can_skip("softmax.complete", visible.all() & seen)
        linear = LINEAR * precision(U)
        if complete and saves_a_pass("softmax.linear", U, lambda: largest_entry(U, 2) * size[:, :, 0, 0] <= linear):
            return (U - U @ log_others.exp()[..., None]).mul_(weight), reach
        E = (U * size).expm1_()
        E = E if saves_a_pass("softmax.unit_size", size, lambda: size == 1) else E.div_(size)
        if complete:
            m = E @ log_others.exp()[..., None]  # [batch, head, token, 1], in units of size
            return E.sub_(m).mul_(weight).div_(1 + size * m), reach
        alone = torch.exp(U * size) / size
        E = torch.where(seen, torch.where(visible, E, -1 / size), torch.where(visible, alone, 0.0))
        m = E @ log_others.exp()[..., None]
        return E.sub_(m * seen).mul_(weight).div_(1 + size * m), reach

    def _steep(
        self, U: Tensor, size: Tensor, visible: Visible, log_P: Tensor, by_column: bool
    ) -> tuple[Tensor, Tensor]:
        """(Delta_ij = p_j expm1(D_ij - log S_i) in the same units, reach), products of small p and large e^D formed as
        sums of their logs. `log_P` is the log of the pattern by a plain log-softmax."""
        D, seen = U * size, self.seen
        log_weight, log_others = self.log_w[:, :, None], self.log_others[:, :, None]
        p = log_others.masked_fill(~seen, -torch.inf).exp()  # without column j*
        above = (D > 1) | ~seen
        terms = torch.where(above, (log_others + D).exp() - p, p * torch.expm1(D.clamp(max=1.0))) / size
        terms = torch.where(visible, terms, -p / size)
        m = terms.sum(-1, keepdim=True) * size
        log_S = torch.log1p(m) / size
        lost = ~_seen_at(self.top, visible) | ~(m < 1e300) | ~(m > -1)  # j* is not seen, or the sum left the range
        # Of a large score log P is a log-softmax, where the largest cancels exactly, and so is log P - log p.
        large = lost | (D.abs() > 1) | ((log_S * size).abs() > 1)
        D = torch.where(large, (log_P - log_weight).masked_fill(~visible, 0.0), (U - log_S) * size)
        log_P = log_P.masked_fill(log_others == -torch.inf, -torch.inf)
        log_p = log_others.masked_fill(~seen, -torch.inf)
        reach = _reach(torch.maximum(log_P.masked_fill(~visible, -torch.inf), log_p), by_column)
        weight = (log_p - reach).exp()  # p in units of e^reach
        grown = (log_P - reach).clamp(max=STEEPEST).exp()
        above = (D > 1) | ~seen
        change = torch.where(above, grown - weight, weight * torch.expm1(D.clamp(max=1.0))) / size
        return torch.where(visible, change, -weight / size), reach


def split(scores: Scores, visible: Visible, valid: ValidTokens, *, tokens: bool = True) -> DeviationPattern:
    """The pattern of scores as p and P - 1 p^T, over the columns visible to each row. Columns are `tokens`,
    of which only valid ones count, or something else, as experts or the tokens of a memory. The scores are used up."""
    centred = about_reference_row(scores, valid, tokens=tokens, in_place=True)
    shared = _shared(centred, visible, valid)
    off_top = shared.off_top(centred.D.value, visible, valid)
    logits = Logits(centred.ref, centred.D, centred.fine)
    return DeviationPattern(shared.p, off_top, shared.top, visible, logits)


def split_columns(
    scores: Scores, visible: Bool[Tensor, "batch row column"], valid: ValidTokens
) -> tuple[Scaled, Scaled]:
    """(p `[batch, column]`, Delta `[batch, column, row]`) of scores of one head over columns that are no tokens, every
    column at a log-scale of its own: it may be all that is left where the others are multiplied with zero."""
    visible = visible[:, None]
    centred = about_reference_row(scores, valid, tokens=False)
    shared = _shared(centred, visible, valid)
    change, log = shared.changes(centred.D.value, visible, valid, by_column=True)
    off_top, top = Scaled(change[:, 0].mT, log[:, 0, 0]), shared.top[:, 0]
    rest = off_top.together()
    value = off_top.value.scatter(1, top[..., None].expand_as(rest.value[:, :1]), -rest.value.sum(1, keepdim=True))
    p = Scaled(shared.seen[:, 0, 0].to(value.dtype), shared.log_w[:, 0].clamp(min=LOWEST))
    return p, Scaled(value, off_top.log.scatter(1, top, rest.log[:, None])).normalised()


def _shared(centred: ReferencedScores, visible: Visible, valid: ValidTokens) -> ReferenceRow:
    """What the rows of the softmax of these scores have in common."""
    ref, D, row, _ = centred
    seen = visible[:, 0].gather(1, row[..., None].expand(-1, -1, visible.shape[-1]))[:, :, None]
    complete = saves_a_pass("softmax.all_visible", visible, lambda: visible)
    if complete:
        alike = torch.ones_like(seen[:, :, 0, 0])  # [batch, head]
    else:
        alike = ((visible == seen).all(-1) | ~valid.mask[:, None]).all(-1)
    return ReferenceRow.of(ref, D.log, seen, visible.any(2), alike, complete=complete)


def _reach(logs: Float[Tensor, "batch head row token"], by_column: bool) -> Tensor:
    """The largest log of each head, `[batch, head, 1, 1]`, or of each of its columns, `[batch, head, 1, token]`."""
    if not logs.numel():
        return logs.sum((2, 3), keepdim=True)
    return logs.amax(2 if by_column else (2, 3), keepdim=True).clamp(min=LOWEST)


def _log_weights(ref: Tensor, seen: Bool[Tensor, "batch head token"]) -> Float[Tensor, "batch head token"]:
    """w: ref minus the log of the sum of e^ref over the columns visible to the reference row."""
    seen_ref = ref.masked_fill(~seen, -torch.inf)
    most = seen_ref.amax(-1, keepdim=True).nan_to_num(neginf=0.0) if ref.shape[-1] else ref.sum(-1, keepdim=True)
    total = (seen_ref - most).exp().sum(-1, keepdim=True)
    return (ref - most) - total.masked_fill(total == 0, 1.0).log()


def _seen_at(top: Tensor, visible: Visible) -> Bool[Tensor, "batch head row 1"]:
    """True for the rows to which column j*, `top`, is visible."""
    rows = visible.expand(-1, top.shape[1], -1, -1)
    return rows.gather(3, top[:, :, None].expand(-1, -1, rows.shape[2], 1))


def balanced(scores: Scores, visible: Visible, valid: ValidTokens, rounds: int) -> Scores:
    """Scores whose softmax is Sinkhorn attention: rounds of dividing columns, then rows, by their sums.

    Rows come last, so that P is a softmax of `s_ij + b_j`; b_j, the same in every row, goes into ref. With
    scores `ref_j + D_ij`, a round is, whatever ref_j was,

        a_i = -log sum_j e^{ref_j + D_ij} over j visible to i,
        ref_j <- -log sum_i e^{D_ij + a_i} over i that see j.

    Where all rows see the same, sums become means, over p and over rows, and both are of the size of D:

        a_i = -log1p(sum_j p_j expm1(D_ij)),    ref_j <- -log1p(mean_i expm1(D_ij + a_i)).

    Elsewhere scores become log P itself, of which each division takes a log-softmax: beside scores of 1e20, a_i and
    ref_j would have lost by how much one weight of a row exceeds another."""
    if not rounds:
        return scores
    ref, D, _, _ = about_reference_row(scores, valid)
    rows, columns = valid.mask[:, None, :, None], visible.any(2, keepdim=True)  # [batch, 1, 1, token]
    alike = ((visible == columns) | ~rows).all(-1).all(-1)  # [batch, 1]
    close = alike & (D.log_size() <= 0.0)  # [batch, head]
    size = spread(D.log.clamp(-STEEPEST, 0.0).exp(), D.value)
    near = Scaled(_balanced_near(ref, D, size, columns, rows, rounds), D.log.clamp(max=0.0))
    zero = Scaled(torch.zeros_like(ref), torch.zeros_like(D.log))
    logs = Scaled(_balanced_logs(Logits(ref, D), visible, rounds), torch.zeros_like(D.log))
    return Scores(chosen(close, near, zero).normalised(), chosen(close, D, logs))


def _balanced_near(ref: Tensor, D: Scaled, size: Tensor, columns: Tensor, rows: Tensor, rounds: int) -> Tensor:
    """ref after the rounds of `balanced` in units of `size`, where all rows see the same and D is at most one."""
    U = D.value * spread(D.log.clamp(min=0.0).exp(), D.value)
    count, E = rows.sum(2), torch.expm1(U * size) / size
    for _ in range(rounds):
        p = ref.masked_fill(~columns[:, :, 0], -torch.inf).softmax(-1)  # [batch, head, token]
        p = p.masked_fill(~columns[:, :, 0], 0.0)
        a = -torch.log1p(size * (E @ p[..., None])) / size  # [batch, head, row, 1]
        mean = (torch.expm1((U + a) * size) / size * rows).sum(2) / count
        in_units = -torch.log1p(size[:, :, 0] * mean) / size[:, :, 0]
        ref = in_units * size[:, :, 0]
    return in_units * columns[:, :, 0]


def _balanced_logs(scores: Logits, visible: Visible, rounds: int) -> Float[Tensor, "batch head row token"]:
    """log P after the rounds of `balanced`; 0 where a row does not see."""
    logs = scores.log_softmax(visible)
    for _ in range(rounds):
        for dim in (-2, -1):
            logs = logs.log_softmax(dim).masked_fill(~visible, -torch.inf)
    return logs.masked_fill(~visible, 0.0)

"""Sinkhorn attention of a state: what rounds of columns and rows add to scores.

Rows are divided by their sums last, so that P is a softmax of `s_ij + b_j`, and b_j, the same in every row,
goes into what rows share. With scores `ref_j + D_ij`, a round is

    a_i = -log sum_j e^{ref_j + D_ij} over what i sees,    ref_j <- -log sum_i e^{D_ij + a_i} over who sees j,

whatever ref_j was: what rows share drops out of the columns. Where all rows see alike, sums become means, of
p and of rows, and both are of the size of D,

    a_i = -log1p(sum_j p_j expm1(D_ij)),    ref_j <- -log1p(mean_i expm1(D_ij + a_i)).
"""

import torch
from torch import Tensor

from rankscope.deviation.attention import Visible
from rankscope.deviation.scaled import STEEPEST, Scaled, chosen, spread
from rankscope.deviation.scores import Scores, about_reference_row
from rankscope.deviation.state import ValidTokens


def balanced(scores: Scores, visible: Visible, valid: ValidTokens, rounds: int) -> Scores:
    """Scores whose softmax is that of the given ones after some rounds."""
    if not rounds:
        return scores
    ref, D, _, _ = about_reference_row(scores, valid)
    rows, columns = valid.mask[:, None, :, None], visible.any(2, keepdim=True)  # [batch, 1, 1, token]
    alike = ((visible == columns) | ~rows).all(-1).all(-1)  # [batch, 1]
    close = alike & (D.log_size() <= 0.0)  # [batch, head]
    level = D.log.clamp(-STEEPEST, 0.0)
    near = Scaled(_near(ref, D, spread(level.exp(), D.value), columns, rows, rounds), D.log.clamp(max=0.0))
    whole = Scaled(_whole(ref, D.explicit(), visible, rounds), torch.zeros_like(D.log))
    return Scores(chosen(close, near, whole).normalised(), D)


def _near(ref: Tensor, D: Scaled, size: Tensor, columns: Tensor, rows: Tensor, rounds: int) -> Tensor:
    """ref in units of `size`, where all rows see alike and D is at most of size one."""
    U = D.value * spread(D.log.clamp(min=0.0).exp(), D.value)
    number, E = rows.sum(2), torch.expm1(U * size) / size
    for _ in range(rounds):
        p = ref.masked_fill(~columns[:, :, 0], -torch.inf).softmax(-1).nan_to_num(0.0)  # [batch, head, token]
        a = -torch.log1p(size * (E @ p[..., None])) / size  # [batch, head, row, 1]
        grown = (torch.expm1((U + a) * size) / size * rows).sum(2) / number
        found = -torch.log1p(size[:, :, 0] * grown) / size[:, :, 0]
        ref = found * size[:, :, 0]
    return found * columns[:, :, 0]


def _whole(ref: Tensor, D: Tensor, visible: Visible, rounds: int) -> Tensor:
    """ref as it is."""
    hidden = ~visible
    for _ in range(rounds):
        a = -_log_sum((ref[:, :, None] + D).masked_fill(hidden, -torch.inf), -1)
        ref = -_log_sum((D + a).masked_fill(hidden, -torch.inf), -2)[:, :, 0]
    return ref


def _log_sum(logs: Tensor, dim: int) -> Tensor:
    """`log sum e^x`; zero of nothing."""
    return logs.logsumexp(dim, keepdim=True).nan_to_num(nan=0.0, neginf=0.0)

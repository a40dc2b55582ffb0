"""Shaped attention of a state: `alpha I + beta P - gamma C`, C the average of what each row sees.

Small scores bring P near C, and what is left of `P - C` is all that centred attention has. With scores s_ij,
m_i the mean of `expm1(s_ij)` over what row i sees,

    E = P - C,    E_ij = C_ij (expm1(s_ij) - m_i) / (1 + m_i),

no two nearly equal numbers are subtracted, and `alpha I + (beta - gamma) C + beta E` is the same matrix.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rankscope.deviation.attention import DeviationPattern, Visible
from rankscope.deviation.decisions import can_skip
from rankscope.deviation.scaled import STEEPEST, Scaled, chosen, spread
from rankscope.nets.remedies.shaping import Shaping, average


def shaped(remedy: Shaping, P: DeviationPattern, block: Any, rules: Any, inside: Any) -> DeviationPattern:
    """With `P = 1 p^T + Delta`, c and e a row of C and of E, and j* the largest entry of p,

        alpha e_j* + (beta - gamma) c + beta e    is shared, and
        alpha (I - 1 e_j*^T) + (beta - gamma) (C - 1 c^T) + beta (E - 1 e^T)    is not:

    outside column j* the first of these three is alpha I. Where rows see alike, `E - 1 e^T` is Delta. Rows
    sum to `alpha + beta - gamma` where those of P sum to one."""
    alpha, beta, gamma = remedy.of_heads(block, P.p)
    valid = inside.valid.mask
    samples, last = torch.arange(len(valid), device=valid.device), _last(valid)
    C = average(P.visible).to(P.p)  # [batch, 1, row, token]
    c = C[samples, 0, last][:, None]  # of a row that sees most
    e, E = _from_average(P, valid, samples, last)
    column = torch.arange(P.p.shape[-1], device=C.device) == P.top  # [batch, head, token]: j*
    shared = Scaled.plain(alpha[:, None] * column + (beta - gamma)[:, None] * c).by_head()
    shared = shared + e.mapped(lambda t: t * beta[:, None]).normalised()
    own = torch.eye(P.p.shape[-1], dtype=P.p.dtype, device=C.device)
    fixed = alpha[:, None, None] * own + (beta - gamma)[:, None, None] * (C - c[:, :, None])
    fixed = fixed.expand(*P.p.shape[:2], -1, -1)
    others = Scaled.plain(fixed).by_head() + E.mapped(lambda t: t * beta[:, None, None]).normalised()
    hidden = column[:, :, None] | ~valid[:, None, :, None]
    others = others.mapped(lambda t: t.masked_fill(hidden, 0.0))
    total = alpha + (beta if P.total is None else beta * P.total) - gamma
    sums = P.row_excess and P.row_excess.mapped(lambda t: t * beta[:, None]).normalised()
    return replace(
        P, p=shared.explicit(), others=others, signed=True, total=total, row_excess=sums, scaled_p=shared
    )


def _from_average(P: DeviationPattern, valid: Tensor, samples: Tensor, last: Tensor) -> tuple[Scaled, Scaled]:
    """(e, E - 1 e^T), the second but for column j* where rows see alike. Of weights that another part has
    changed, which need not be near C, E is the difference."""
    if P.signed or P.logits is None:
        C = average(P.visible).to(P.p)
        c = C[samples, :, last]
        e = (P.scaled_p or Scaled.plain(P.p).by_head()) + Scaled.plain(-c.expand_as(P.p)).by_head()
        apart = (c[:, :, None] - C).expand(*P.p.shape[:2], -1, -1)
        return e, P.others + Scaled.plain(apart).by_head()
    row = P.visible[samples, :, last][:, :, None]  # [batch, 1, 1, token]
    e = _less_average(P.logits.reference.mapped(lambda t: t[:, :, None]), row)
    e = e.mapped(lambda t: t[:, :, 0])
    alike = ((P.visible == row).all(-1)[:, 0] | ~valid).all(-1)  # [batch]
    if can_skip("shaping.alike", alike.all()):
        return e, P.others
    scores = P.logits.reference.mapped(lambda t: t[:, :, None]) + P.logits.D
    E = _less_average(scores, P.visible)
    first = E.mapped(lambda t: t[samples, :, last])
    alike = alike[:, None].expand(P.p.shape[:2])
    return chosen(alike, e, first), chosen(alike, P.others, E.mapped(lambda t: t - t[samples, :, last, None]))


def _less_average(scores: Scaled, visible: Visible) -> Scaled:
    """The softmax of scores less the average of what each row sees; zero of a row that sees nothing."""
    scores = scores.mapped(lambda t: torch.where(visible, t, torch.zeros_like(t))).normalised()
    C = average(visible).to(scores.value)
    size = spread(scores.log.clamp(-STEEPEST, 0.0).exp(), scores.value)
    E = torch.expm1(scores.value * size) / size
    m = (C * E).sum(-1, keepdim=True)
    near = Scaled(C * (E - m) / (1 + size * m), scores.log)
    plain = scores.explicit().masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0)
    return chosen(
        scores.log_size() <= 0.0, near, Scaled(plain - C, torch.zeros_like(scores.log))
    ).normalised()


def _last(valid: Tensor) -> Tensor:
    """The last valid token of each sample."""
    places = torch.arange(valid.shape[1], device=valid.device)
    return torch.where(valid, places, 0).amax(-1)

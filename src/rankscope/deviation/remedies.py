"""Rules of the remedies (`nets/remedies/`) on states."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from rankscope.deviation.attention import Attention
from rankscope.deviation.remedies_branches import weighted
from rankscope.deviation.remedies_gates import head_gated
from rankscope.deviation.remedies_tokens import contrasted, featscaled
from rankscope.deviation.remedies_values import drawn, value_residual
from rankscope.deviation.scaled import Scaled
from rankscope.nets.remedies.branches import ByDepth, ByLayer, Trained
from rankscope.nets.remedies.contranorm import Contrast
from rankscope.nets.remedies.featscale import FeatScale
from rankscope.nets.remedies.gates import HeadGate
from rankscope.nets.remedies.shaping import AttnScale, Centred, Shaped, Shaping, average
from rankscope.nets.remedies.values import Drawn, ValueResidual

Rule = Callable[[Any, Any, Any, Any, Any], Any]
"""(remedy, x, block, rules, inside)."""


def shaped(remedy: Shaping, P: Attention, block: Any, rules: Any, inside: Any) -> Attention:
    """`alpha I + beta P - gamma C`. With `P = 1 p^T + Delta`, c a row of C and j* the largest entry of p,

        alpha e_j* + beta p - gamma c    is shared, and
        alpha (I - 1 e_j*^T) + beta Delta - gamma (C - 1 c^T)    is not:

    outside column j* the first of these three is alpha I. Rows sum to `alpha + beta - gamma`."""
    alpha, beta, gamma = remedy.numbers(block.weights.parts.get(remedy.name, {}))
    alpha, beta, gamma = (each.to(P.p) for each in (alpha, beta, gamma))
    real = inside.real.rows
    C = average(P.visible).to(P.p)  # [batch, 1, row, token]
    c = C[torch.arange(len(C), device=C.device), 0, _last(real)][:, None]  # of a row that sees most
    column = torch.arange(P.p.shape[-1], device=C.device) == P.top  # [batch, head, token]: j*
    p = alpha[:, None] * column + beta[:, None] * P.p - gamma[:, None] * c
    rows = real[:, None, :, None]
    own = torch.eye(P.p.shape[-1], dtype=P.p.dtype, device=C.device)
    fixed = alpha[:, None, None] * own - gamma[:, None, None] * (C - c[:, :, None])
    fixed = (fixed * rows).masked_fill(column[:, :, None], 0.0)  # [batch, head, row, token]
    others = P.others.mapped(lambda t: t * beta[:, None, None]) + Scaled.plain(fixed).by_head()
    return replace(P, p=p, others=others, signed=True, total=alpha + beta - gamma)


def _last(real: torch.Tensor) -> torch.Tensor:
    """The last real token of each sample."""
    places = torch.arange(real.shape[1], device=real.device)
    return torch.where(real, places, 0).amax(-1)


RULES: dict[type, Rule] = {
    **dict.fromkeys((Shaped, AttnScale, Centred), shaped),
    **dict.fromkeys((Trained, ByDepth, ByLayer), weighted),
    **{
        ValueResidual: value_residual,
        Drawn: drawn,
        FeatScale: featscaled,
        Contrast: contrasted,
        HeadGate: head_gated,
    },
}

"""Rules of the remedies on tokens (`nets/remedies/featscale.py`, `contranorm.py`) on states."""

from typing import Any

import torch

from rankscope.deviation.attention import Values, mixed
from rankscope.deviation.norms import normed
from rankscope.deviation.scaled import Scaled
from rankscope.deviation.scores import Scores
from rankscope.deviation.softmax import split
from rankscope.deviation.state import State
from rankscope.nets.norms import UNWEIGHTED
from rankscope.nets.remedies.contranorm import Contrast
from rankscope.nets.remedies.featscale import FeatScale, averages


def featscaled(remedy: FeatScale, A: State, block: Any, rules: Any, inside: Any) -> State:
    """`A + s m + t (A - m)`. With `A = 1 a^T + R`, a the mean, and c a row of C,

        1 (a (1 + s) + (s - t) c^T R)    is shared, and
        (1 + t) R + (s - t) (C - 1 c^T) R    is not:

    under a complete mask the last of these is exactly zero."""
    s, t = (block.weights.parts[remedy.name][name] for name in ("s", "t"))
    mean, R = A.centred()
    C = averages(block, rules).to(R.value).expand(len(R.value), -1, -1)
    last = torch.where(A.valid.mask, torch.arange(C.shape[-1], device=C.device), 0).amax(-1)
    c = C[torch.arange(len(C), device=C.device), last][:, None]  # of a row that sees most
    common = (A.x + mean).mapped(lambda v: v * (1 + s)) + R.mapped(lambda v: (c @ v)[:, 0] * (s - t))
    apart = (C - c) * A.valid.mask[..., None]
    return State(common, R.mapped(lambda v: v * (1 + t) + apart @ v * (s - t)), A.valid)


def contrasted(part: Contrast, state: State, block: Any, rules: Any, inside: Any) -> State:
    """`(1 + s) X - s S X`: S is attention of one head whose queries and keys are the tokens at length one,
    and whose values are the tokens."""
    if not part.stands(block):
        return state
    unit = rules.tidy(normed(state, "scale", UNWEIGHTED, 0.0, rules.perturb_tensor))
    h, d = rules.perturb(unit.x), rules.perturb(unit.R)
    ref = Scaled((d.value @ h.value[..., None])[..., 0], d.log + h.log)
    D = Scaled(d.value @ d.value.mT, 2 * d.log)
    visible = rules.settings.visible[block.arch.mask_of(block.index)].expand(
        len(state.valid.mask), -1, -1, -1
    )
    S = split(Scores(_head(ref), _head(D)), visible, state.valid)
    everyone, output = tuple(range(block.arch.heads)), block.weights.attention.output.weight
    said = mixed(block.arch, everyone, output, S, Values(_head(state.x), _head(state.R), state.valid))
    x, R = (Scaled(each.value[:, 0], each.log[:, 0]) for each in (said.x, said.R))
    s = part.s
    return rules.tidy(State(state.x * (1 + s) + x * -s, state.R * (1 + s) + R * -s, state.valid))


def _head(part: Scaled) -> Scaled:
    """With an axis for one head."""
    return part.mapped(lambda v: v[:, None]).by_head()

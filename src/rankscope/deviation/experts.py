"""The mixture of experts of a state: routing weights and experts' outputs, each as a common part and the rest.

Called by `rules.py` (`mixture`); calls `mlp.py` for each expert and `softmax.py` for the router. The weights of the
experts are a softmax of the router's scores over those that a token has chosen, as rows of attention are over what a
token sees, so `softmax.py` splits them alike: `p_ie = p_e + Delta_ie`, p those of one of the tokens. With `f_e(x_i) =
F_e + dF_ie` (`mlp.py`),

    sum_e p_ie f_e(x_i) = sum_e p_e F_e + sum_e (Delta_ie F_e + p_e dF_ie + Delta_ie dF_ie):

nothing nearly equal is subtracted. Tokens that choose other experts than the one of p have in Delta what they alone
choose, and less what they do not: two such tokens are as far apart as the experts are, however close they were. The
shared expert's sigmoid is a softmax of two, one score of which is zero. Sigmoids s(z) that are divided by their sum
are a softmax of `log s(z)`, to which a token that adds d to z adds `-log(1 + s(-z) (e^-d - 1))`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rankscope.deviation.attention import sigmoid
from rankscope.deviation.mlp import affine, mlp, product, rows
from rankscope.deviation.scaled import Scaled
from rankscope.deviation.scores import Scores, about_reference_row
from rankscope.deviation.softmax import split
from rankscope.deviation.state import State
from rankscope.nets.architecture import Architecture
from rankscope.nets.mlp import Experts, in_best_groups, largest
from rankscope.nets.weights import ExpertWeights, Linear

PerturbScaled = Callable[[Scaled], Scaled]


def mixture(
    arch: Architecture, w: ExpertWeights, state: State, perturb: PerturbScaled = lambda part: part
) -> tuple[State, Tensor]:
    """(the MLP branch of the mixture, the weight of each expert for each token `[batch, token, expert]`)."""
    assert arch.experts is not None
    p, Delta, chosen = _route(_scores(state, w.router, perturb), state, arch.experts, w.correction)
    weights = (p[:, None] + Delta.explicit()) * chosen
    x, R = Scaled.plain(state.x.value * 0.0), Scaled.plain(state.R.value * 0.0)
    x, R = x.normalised(), R.normalised()  # zeros do not set the scale
    taken = (chosen & state.valid.mask[..., None]).flatten(0, 1).any(0).nonzero()[:, 0].tolist()
    for e in taken:
        output = mlp(arch, w.expert(e), state, perturb)
        added = _weighed(p[:, e], Delta.mapped(lambda v, e=e: v[..., e]), output)
        x, R = x + added.x, R + added.R
    if w.shared is not None:
        shared = mlp(arch, w.shared, state, perturb)
        if w.shared_gate is not None:
            shared = _weighed(*_sigmoid(_scores(state, w.shared_gate, perturb), state), shared)
        x, R = x + shared.x, R + shared.R
    return State(x, R, state.valid), weights


def _weighed(p: Tensor, Delta: Scaled, branch: State) -> State:
    """A branch f times its weights, `(p + Delta_i) f(x_i)`, p `[batch]` and Delta `[batch, token]`."""
    change, weight = Delta.mapped(lambda v: v[..., None]), Scaled.plain(p[:, None])
    R = product(change, rows(branch.x)) + product(rows(weight), branch.R) + product(change, branch.R)
    return State(product(weight, branch.x), R, branch.valid)


def _scores(state: State, linear: Linear, perturb: PerturbScaled) -> Scores:
    """The router's scores `x W`, of the common token and of deviations, in the form of scores of one head."""
    ref, D = perturb(affine(state.x, linear)), perturb(state.R.mapped(lambda v: v @ linear.weight))
    return Scores(ref.mapped(lambda v: v[:, None]).by_head(), D.mapped(lambda v: v[:, None]).by_head())


def _route(scores: Scores, state: State, experts: Experts, correction: Tensor | None) -> tuple[Tensor, Scaled, Tensor]:
    """(p, Delta, the chosen experts `[batch, token, expert]`): routing weights, zero for experts not chosen."""
    centred = about_reference_row(scores, state.valid, tokens=False)
    logits = centred.ref[:, :, None] + centred.D.explicit()  # [batch, 1, token, expert]
    s = logits  # which orders them as scores do, but for groups and corrections
    if correction is not None or experts.groups > 1:
        s = logits.sigmoid() if experts.sigmoid else logits.softmax(-1)
    chosen = largest(in_best_groups(s if correction is None else s + correction, experts), experts.chosen)
    if experts.renormalised:
        p, Delta = _split(_log_sigmoids(scores) if experts.sigmoid else scores, chosen, state)
        return p, Delta, chosen[:, 0]
    if experts.sigmoid:
        gate, moved = sigmoid(centred.fine.together(), centred.D.together())
        p, Delta = gate.explicit()[:, 0], Scaled(moved.value[:, 0], moved.log[:, 0])
    else:
        p, Delta = _split(scores, torch.ones_like(chosen), state)
    chosen, row = chosen[:, 0], centred.row[:, :, None].expand(-1, -1, experts.number)
    of_reference = chosen.gather(1, row)  # the experts of the token that p is of
    change = p[:, None] * (chosen & ~of_reference) - p[:, None] * (of_reference & ~chosen)
    # Where all choose alike there is nothing to add, and nothing to set the scale.
    Delta = Delta.mapped(lambda v: v * chosen) + Scaled.plain(state.valid.zero_padding(change)).normalised()
    return p * of_reference[:, 0], Delta, chosen


def _sigmoid(scores: Scores, state: State) -> tuple[Tensor, Scaled]:
    """The sigmoid of one score per token, as a softmax of zero and that score."""
    scores = Scores(*(part.mapped(lambda v: torch.cat([torch.zeros_like(v), v], -1)) for part in scores))
    p, Delta = _split(scores, torch.ones_like(scores.D.value, dtype=torch.bool), state)
    return p[:, 1], Delta.mapped(lambda v: v[..., 1])


def _log_sigmoids(scores: Scores) -> Scores:
    """`log s(z)` of scores z, s the sigmoid."""
    z, d = scores.ref.explicit()[:, :, None], scores.D.explicit()
    moved, shut = z + d, (-z).sigmoid().expand_as(d)
    logs, later = (part.clamp(max=0.0) - (-part.abs()).exp().log1p() for part in (z, moved))
    near = -(shut * torch.expm1(-d.clamp(-1.0, 1.0))).log1p()
    safe = d.masked_fill(d == 0, 1.0)
    slope = torch.where(d.abs() <= 1, near, later - logs) / safe  # of what d adds
    D = Scaled(scores.D.value * torch.where(d == 0, shut, slope), scores.D.log)
    return Scores(Scaled.plain(logs[:, :, 0]).by_head(), D)


def _split(scores: Scores, seen: Tensor, state: State) -> tuple[Tensor, Scaled]:
    """The softmax of scores over the experts in `seen`, as p `[batch, expert]` and Delta `[batch, token, expert]`."""
    pattern = split(scores, seen, state.valid, tokens=False)
    Delta = pattern.by_head
    return pattern.p[:, 0], Scaled(Delta.value[:, 0], Delta.log[:, 0])

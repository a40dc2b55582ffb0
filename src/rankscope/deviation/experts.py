"""The mixture of experts of a state: routing weights and experts' outputs, each as a common part and the rest.

Called by `rules.py` (`mixture`); calls `mlp.py` for each expert and `softmax.py` for the router. The weights of the
experts are a softmax of the router's scores over those that a token has chosen, as rows of attention are over what a
token sees, so `softmax.py` splits them alike: `p_ie = p_e + Delta_ie`, p those of one of the tokens. With `f_e(x_i) =
F_e + dF_ie` (`mlp.py`),

    sum_e p_ie f_e(x_i) = sum_e p_e F_e + sum_e (Delta_ie F_e + p_e dF_ie + Delta_ie dF_ie):

nothing nearly equal is subtracted. The weights of every expert have a log-scale of their own: an expert of weight
e^-2000 is all there is where the outputs of the others are zero. Tokens that choose other experts than the one of p
have in Delta what they alone choose, and less what they do not: two such tokens are as far apart as the experts are,
however close they were. Sigmoids s(z) that are divided by their sum are a softmax of `log s(z)`, to which a token that
adds d to z adds `-log(1 + s(-z) (e^-d - 1))`; other sigmoids are gates as heads have them (`attention.py`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rankscope.deviation.attention import sigmoid
from rankscope.deviation.mlp import affine, mlp, product, rows
from rankscope.deviation.scores import ReferencedScores, Scores, about_reference_row
from rankscope.deviation.softmax import split_columns
from rankscope.deviation.state import Scaled, State
from rankscope.nets import Architecture, Experts, ExpertWeights, Linear, chosen_experts, chosen_weights, log_sigmoid
from rankscope.shapes import Bool

PerturbScaled = Callable[[Scaled], Scaled]


def mixture(
    arch: Architecture, w: ExpertWeights, state: State, perturb: PerturbScaled = lambda part: part
) -> tuple[State, Tensor]:
    """(the MLP branch of the mixture, the weight of each expert for each token `[batch, token, expert]`)."""
    assert arch.experts is not None
    scores = _scores(state, w.router, perturb)
    centred = about_reference_row(scores, state.valid, tokens=False)
    logits = (centred.fine.mapped(lambda v: v[:, :, None].expand_as(centred.D.value)) + centred.D).together()
    logits = logits.mapped(lambda v: v[:, 0])  # [batch, token, expert]
    chosen = chosen_experts(logits.value, arch.experts, w.correction, logits.log[:, None, None])
    p, Delta = _weights(scores, centred, chosen, state, arch.experts)
    x, R = Scaled.plain(state.x.value * 0.0), Scaled.plain(state.R.value * 0.0)
    x, R = x.normalised(), R.normalised()  # zeros do not set the scale
    taken = (chosen & state.valid.mask[..., None]).flatten(0, 1).any(0).nonzero()[:, 0].tolist()
    for e in taken:
        output = mlp(arch, w.expert(e), state, perturb, arch.experts.limit)
        added = _weighed(perturb(p[:, e]), perturb(Delta[:, e]), output)  # which may cancel
        x, R = x + added.x, R + added.R
    if w.shared is not None:
        shared = mlp(arch, w.shared, state, perturb)
        if w.shared_gate is not None:
            gates = about_reference_row(_scores(state, w.shared_gate, perturb), state.valid, tokens=False)
            gate, change = _sigmoids(gates)
            shared = _weighed(perturb(gate[:, 0]), perturb(change[:, 0]), shared)
        x, R = x + shared.x, R + shared.R
    return State(x, R, state.valid), chosen_weights(logits.explicit(), arch.experts, chosen)


def _weighed(p: Scaled, Delta: Scaled, branch: State) -> State:
    """A branch f times its weights, `(p + Delta_i) f(x_i)`, p `[batch]` and Delta `[batch, token]`."""
    change, weight = Delta.mapped(lambda v: v[..., None]), p.mapped(lambda v: v[:, None])
    R = product(change, rows(branch.x)) + product(rows(weight), branch.R) + product(change, branch.R)
    return State(product(weight, branch.x), R, branch.valid)


def _scores(state: State, linear: Linear, perturb: PerturbScaled) -> Scores:
    """The router's scores `x W`, of the common token and of deviations, in the form of scores of one head."""
    ref, D = perturb(affine(state.x, linear)), perturb(state.R.mapped(lambda v: v @ linear.weight))
    return Scores(ref.mapped(lambda v: v[:, None]).by_head(), D.mapped(lambda v: v[:, None]).by_head())


def _weights(
    scores: Scores,
    centred: ReferencedScores,
    chosen: Bool[Tensor, "batch token expert"],
    state: State,
    experts: Experts,
) -> tuple[Scaled, Scaled]:
    """(p `[batch, expert]`, Delta `[batch, expert, token]`): routing weights, zero for experts not chosen."""
    if experts.renormalised:
        return split_columns(_log_sigmoids(scores) if experts.sigmoid else scores, chosen, state.valid)
    if experts.sigmoid:
        p, Delta = _sigmoids(centred)
    else:
        p, Delta = split_columns(scores, torch.ones_like(chosen), state.valid)
    taken = chosen.mT.to(Delta.value.dtype)
    of_reference = taken.gather(2, centred.row[:, :, None].expand(-1, experts.number, -1))  # the token that p is of
    change = Scaled(p.value[..., None] * (taken - of_reference) * state.valid.mask[:, None], p.log)
    # Where all choose alike there is nothing to add, and nothing to set the scale.
    Delta = Delta.mapped(lambda v: v * taken) + change.normalised()
    return p.mapped(lambda v: v * of_reference[..., 0]), Delta


def _sigmoids(centred: ReferencedScores) -> tuple[Scaled, Scaled]:
    """The sigmoids of scores: (those of the reference row `[batch, expert]`, what tokens add to them)."""
    ref, D = centred.fine, centred.D
    log = ref.log.expand(-1, ref.value.shape[-1])
    z = Scaled(ref.value.mT, log).normalised()  # [batch, expert, 1], every expert a head
    d = Scaled(D.value.permute(0, 3, 2, 1), D.log.expand_as(log)).normalised()
    gate, change = sigmoid(z, d)
    return gate.mapped(lambda v: v[..., 0]), change.mapped(lambda v: v[..., 0])


def _log_sigmoids(scores: Scores) -> Scores:
    """`log s(z)` of scores z, s the sigmoid."""
    z, d = scores.ref.explicit()[:, :, None], scores.D.explicit()
    moved, shut = z + d, (-z).sigmoid().expand_as(d)
    logs, later = log_sigmoid(z), log_sigmoid(moved)
    near = -(shut * torch.expm1(-d.clamp(-1.0, 1.0))).log1p()
    safe = d.masked_fill(d == 0, 1.0)
    slope = torch.where(d.abs() <= 1, near, later - logs) / safe  # of what d adds
    D = Scaled(scores.D.value * torch.where(d == 0, shut, slope), scores.D.log)
    return Scores(Scaled.plain(logs[:, :, 0]).by_head(), D)

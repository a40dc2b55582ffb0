"""What no branch can write to: a lower bound from the weights alone (after Dong et al. 2021, section 3).

With skips and no norm after them, `X' = w X + branch(X)`, every branch writes into the row space of its
output matrices. Let Q project onto what is orthogonal to all of them up to layer L. Then, up to
a constant row (biases),

    X_L Q = (prod w) X_0 Q,
    mu(X_L) >= prod|w| ||res(X_0) Q||_F

for every depth, however the heads attend. Any matrix Q of norm one will do, less what branches do write to
it: what they added, F, is measured, and `mu(X_L) >= prod|w| ||res(X_0) Q|| - sum ||res(F) Q||`, so that
outputs which all but miss a direction, or that rounding has turned a little, take off what they are worth.
The paper's remark that skips admit infinitely many parameterisations which never collapse, at arbitrarily
small beta, is the case where Q keeps all of res(X_0) (`non_collapsing.py`).
"""

import math

import torch
from torch import Tensor

from rankscope.deviation import Scaled
from rankscope.nets.order import active_heads, order
from rankscope.theory.constants import lost
from rankscope.theory.dobrushin import seen
from rankscope.theory.facts import Facts
from rankscope.theory.hypotheses import above, equal, no_norm_after, skips
from rankscope.theory.logs import log, minus, plus, sized, times
from rankscope.theory.theorem import Evaluation, Theorem, by_layer

ROUNDING = 1e-14
"""Directions that rows of length one reach by less than this count as not reached."""


def _written(facts: Facts, index: int) -> Tensor:
    """The rows of layer `index`'s output matrices, of length one: values may be as large as outputs are
    small."""
    layer = facts.net.weights.layers[index]
    parts = [layer.attention.output.weight[list(active_heads(facts.arch, index))].flatten(0, 1)]
    if facts.arch.mlp != "none":
        parts.append(facts.net.blocks[index].mlp.down.weight)
    rows = torch.cat(parts).double()
    rows = rows / rows.abs().amax(-1, keepdim=True).clamp(min=5e-324)
    return torch.nn.functional.normalize(rows, dim=-1)


def _basis(rows: Tensor) -> Tensor:
    """An orthonormal basis of the row space; where that is plainly everything, without decomposing it."""
    width = rows.shape[-1]
    eye = torch.eye(width, dtype=rows.dtype, device=rows.device)
    if len(rows) >= width and int(torch.linalg.cholesky_ex(rows.mT @ rows - 1e-6 * eye).info) == 0:
        return eye
    _, s, Vh = torch.linalg.svd(rows, full_matrices=False)
    return Vh[s > ROUNDING * s.max().clamp(min=1.0)] if len(s) else Vh


def _evaluate(facts: Facts) -> Evaluation:
    arch, width = facts.arch, facts.arch.width
    weight = math.prod(skips(arch))
    sandwich = any(branch.after is not None for half in order(arch) for branch in half.branches)
    fixed = [
        above("|weight| of the skips", weight, 0),
        no_norm_after(arch),
        equal("norms after a branch", sandwich, 0),
        *seen(facts),
    ]
    if not all(hypothesis.met for hypothesis in fixed):
        return Evaluation([math.nan] * facts.depth, by_layer(facts, fixed))
    basis, bounds, left = torch.zeros(0, width, dtype=torch.float64, device=facts.X.device), [], []
    for index in range(facts.depth):
        if len(basis) < width:
            basis = _basis(torch.cat([basis, _written(facts, index)]))
        left.append(width - len(basis))
        bounds.append(_kept(facts, index + 1, basis) if left[-1] else -math.inf)
    moving = [above("directions that no branch writes to", float(directions), 0) for directions in left]
    return Evaluation(bounds, by_layer(facts, fixed, lambda upto: [moving[upto - 1]]))


def _kept(facts: Facts, upto: int, basis: Tensor) -> float:
    """log of `prod|w| ||res(X_0) Q||` less what the branches of these layers did write to Q."""
    Q = torch.eye(facts.arch.width, dtype=torch.float64, device=basis.device) - basis.mT @ basis
    kept, written = _seen(sized(facts.first.centred()[1]), Q, -1), -math.inf
    for half in (half for layer in facts.layers[:upto] for half in layer.halves):
        weight = log(abs(half.weight))
        kept, written = times(kept, weight), plus(times(written, weight), _seen(half.branch, Q, 1))
    return times(
        minus(kept, written), -math.log1p(lost(facts.arch.width))
    )  # Q's own norm is one but for this


def _seen(R: Scaled, Q: Tensor, side: int) -> float:
    """log of `||R Q||_F`, with what rounding may have made of it added or taken away."""
    value = R.value[0]
    size = float((value @ Q).norm()) + side * lost(len(Q)) * float((value.abs() @ Q.abs()).norm())
    return times(log(size), float(R.log[0]))


UNTOUCHED = Theorem(
    "untouched", "this project, after Dong et al. 2021, section 3",
    "mu >= prod|w| ||res(X_0) Q||, Q orthogonal to all that branches write", "mu", "lower", _evaluate,
)  # fmt: skip

"""Lower bounds: what skips keep apart, what no branch can write to, what norms leave of the rank.

**When collapse is excluded.** `X' = norm(w X + branch(X))`, R the deviation of X about the mean, F that of
the branch, in Frobenius norms:

    ||w R + F|| >= (|w| - c) ||R||,    c = ||F|| / ||R||            (elementary: the triangle inequality)
    ||w R + F|| >= |w + a| ||R||,      a = <F, R> / ||R||^2         (aligned: Cauchy and Schwarz)

c and a are measured. The second is never below the first, since |a| <= c. A norm after the sum U multiplies by its
measured `n = ||res(norm U)|| / ||res(U)||`. Attention and MLP halves multiply.

**Untouched directions**, from the weights alone (after Dong et al. 2021, section 3). With skips and no norm
after them, every branch writes into the row space of its output matrices. Let Q project onto what is
orthogonal to all of them up to layer L. Then, up to a constant row (biases), for every depth, however the
heads attend,

    X_L Q = (prod w) X_0 Q,    mu(X_L) >= prod|w| ||res(X_0) Q||_F.

Any matrix Q of norm one will do, less what branches do write to it: what they added, F, is measured, and
`mu(X_L) >= prod|w| ||res(X_0) Q|| - sum ||res(F) Q||`. Where Q keeps all of res(X_0), tokens never collapse, at
arbitrarily small beta: the paper's remark (`rankscope_studies.hand_built`).

**lambda-skip**, a lower bound for `Y' = norm(w Y + Z)` (as Joseph et al. 2025). Tokens y_i of one length,
here 1, the branch z_i of length at most s < |w|, Z's deviation at most c times Y's in the Frobenius norm.
With `u = w y + z`, whose lengths can differ by the branch alone,

    |y'_i - y'_j|^2 = (|u_i - u_j|^2 - (|u_i| - |u_j|)^2) / (|u_i| |u_j|),
    ||u_i| - |u_j|| <= (|w| s |y_i - y_j| + (|w| + s) |z_i - z_j|) / (|w| - s).

Summed over pairs (Minkowski), `sum |z_i - z_j|^2 <= c^2 sum |y_i - y_j|^2`, and every |u_i| <= |w| + s:

    mu(Y')^2 >= [(|w| - c)^2 - ((|w| s + (|w| + s) c) / (|w| - s))^2] / (|w| + s)^2  mu(Y)^2.

Gains that change from layer to layer change the length of tokens, and mu with it. LayerNorm centres: Y is
centred already, and centring Z makes neither s nor c larger. For |w| well above s and c the factor is about
`1 - (2 s + c) / |w|`: collapse is at most exponential, at a rate that the weight sets. s and c are measured.
The statement and its constants are this project's.

**Norms are neutral to rank**, but for one or two. A norm multiplies rows by positive numbers, `D X`, which keeps the
rank of X, and the affine rank (of X - 1 mean^T) is the rank or one less, for X as for D X. LayerNorm centres each
token first, which takes at most one more away; a gain that is zero takes one; biases move all tokens alike:

    affine rank after >= affine rank before - 1   (scale, rms),   - 2   (layer),   - zero gains.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rankscope.deviation import Scaled
from rankscope.theory import theorem as needs
from rankscope.theory.facts import Facts, HalfFacts
from rankscope.theory.logs import log, minus, plus, sized, times
from rankscope.theory.theorem import Evaluation, Hypothesis, by_layer, refusal, theorem
from rankscope.theory.upper_bounds import branches_recorded, product
from rankscope.theory.weight_norms import lost, of_heads
from rankscope.theory.wu2024 import directions, of_one_length, one_length


def _skips(facts: Facts, factor: Callable[[HalfFacts[float]], float]) -> Evaluation:
    fixed = [needs.above("|weight| of the skips", min(needs.skips(facts.arch)), 0), *branches_recorded(facts)]
    factors = [
        times(*(log_factor for half in layer.halves for log_factor in (factor(half), half.log_norm)))
        for layer in facts.layers
    ]
    return Evaluation(product(facts.sizes[0].mu, factors), by_layer(facts, fixed))


@theorem("elementary-skip", "this project", "mu", "lower")
def elementary_skip(facts: Facts) -> Evaluation:
    """mu >= product of (|w| - c) n, c and n measured"""
    return _skips(facts, lambda half: minus(log(abs(half.weight)), half.log_gain))


@theorem("aligned-skip", "this project", "mu", "lower")
def aligned_skip(facts: Facts) -> Evaluation:
    """mu >= product of |w + a| n, a and n measured"""
    return _skips(facts, lambda half: log(abs(half.weight + half.alignment)))


UNREACHED = 1e-14  # Directions that rows of length one reach by less than this count as not reached


def _basis(rows: Tensor) -> Tensor:
    """An orthonormal basis of the row space; where that is plainly everything, without decomposing it."""
    width = rows.shape[-1]
    eye = torch.eye(width, dtype=rows.dtype, device=rows.device)
    if len(rows) >= width and int(torch.linalg.cholesky_ex(rows.mT @ rows - 1e-6 * eye).info) == 0:
        return eye
    _, s, Vh = torch.linalg.svd(rows, full_matrices=False)
    return Vh[s > UNREACHED * s.max().clamp(min=1.0)] if len(s) else Vh


def _bases(facts: Facts) -> Iterator[Tensor]:
    """By layer, an orthonormal basis of all that branches write up to it."""
    width, like = facts.arch.width, facts.net.weights.like
    basis = torch.zeros(0, width, dtype=torch.float64, device=like.device)
    for block in facts.net.blocks:
        if len(basis) < width:
            parts = [of_heads(block.weights.attention.output.weight, block.active_heads, 0).flatten(0, 1)]
            parts += [] if facts.arch.mlp == "none" else [block.mlp.down.weight]
            # Of length one: values may be as large as outputs are small.
            basis = _basis(torch.cat([basis, directions(torch.cat(parts).double())]))
        yield basis


@theorem("untouched", "this project, after Dong et al. 2021, section 3", "mu", "lower")
def untouched(facts: Facts) -> Evaluation:
    """mu >= prod|w| ||res(X_0) Q||, Q orthogonal to all that branches write"""
    arch, width = facts.arch, facts.arch.width
    weight = math.prod(needs.skips(arch))
    fixed = [
        needs.above("|weight| of the skips", weight, 0),
        needs.equal("norms after a skip's sum", needs.normed_sums(arch), 0),
        needs.equal("norms after a branch", needs.normed_branches(arch), 0),
        *branches_recorded(facts),
    ]
    if refused := refusal(facts, fixed, of_averages=False):
        return refused
    bases = facts.of_network("written", lambda: list(_bases(facts)))
    left = [width - len(basis) for basis in bases]
    bounds = [
        _kept(facts, layer, basis) if count else -math.inf
        for layer, (basis, count) in enumerate(zip(bases, left, strict=True), 1)
    ]
    moving = [needs.above("directions that no branch writes to", float(count), 0) for count in left]
    return Evaluation(bounds, by_layer(facts, fixed, lambda upto: [moving[upto - 1]]))


def _kept(facts: Facts, upto: int, basis: Tensor) -> float:
    """log of `prod|w| ||res(X_0) Q||` less what the branches of these layers did write to Q."""
    Q = torch.eye(facts.arch.width, dtype=torch.float64, device=basis.device) - basis.mT @ basis
    kept, written = _log_size(sized(facts.first.centred()[1]), Q, -1), -math.inf
    for layer, branches in zip(facts.layers[:upto], facts.branches, strict=False):
        for half, branch in zip(layer.halves, branches, strict=True):
            weight = log(abs(half.weight))
            kept, written = times(kept, weight), plus(times(written, weight), _log_size(branch, Q, 1))
    return times(minus(kept, written), -math.log1p(lost(facts.arch.width)))  # Q's own norm is one but for this


def _log_size(R: Scaled, Q: Tensor, side: int) -> float:
    """log of `||R Q||_F`, with what rounding may have made of it added or taken away."""
    value = R.value[0]
    size = float((value @ Q).norm()) + side * lost(len(Q)) * float((value.abs() @ Q.abs()).norm())
    return times(log(size), float(R.log[0]))


def log_factor(w: float, s: float, c: float) -> float:
    """log of the factor of mu; -inf where it says nothing.

    >>> math.exp(log_factor(1.0, 0.0, 0.0)), log_factor(1.0, 1.0, 0.5)
    (1.0, -inf)
    """
    if s >= w or c >= w:
        return -math.inf
    lengths = (w * s + (w + s) * c) / (w - s)
    square = (w - c) ** 2 - lengths**2
    return 0.5 * log(square) - math.log(w + s)


@theorem("lambda-skip", "this project, in the setting of Joseph et al. 2025", "mu", "lower")
def lambda_skip(facts: Facts) -> Evaluation:
    """mu' >= sqrt((w-c)^2 - ((w s + (w+s) c)/(w-s))^2) / (w+s) mu under a norm"""
    arch, r = facts.arch, facts.sizes[1].mu
    w = abs(arch.attention_skip)
    fixed = [
        needs.softmax(arch),
        needs.no_mlp(arch),
        needs.above("|weight of the skip|", w, 0),
        *one_length(facts, centring=True),
    ]
    if refused := refusal(facts, fixed, of_averages=False):
        return refused
    bounds: list[float] = []
    largest: list[float] = []
    for index, layer in enumerate(facts.layers):
        length, half = facts.sizes[index].longest, layer.halves[0]
        s = math.exp(min(half.log_longest - length, 700.0)) if index else 0.0
        if index:  # layer 1 is where tokens first are of one length
            grown = facts.sizes[index + 1].longest - length if length > -math.inf else -math.inf
            r = times(r, grown, log_factor(w, s, math.exp(min(half.log_gain, 700.0))))
        bounds.append(r)
        largest.append(max(s, largest[-1] if largest else 0.0))

    def moving(upto: int) -> list[Hypothesis]:
        says = "longest token of a branch, in lengths of a token"
        return [needs.at_most(says, largest[upto - 1], w, measured=True), of_one_length(facts, upto)]

    return Evaluation(bounds, by_layer(facts, fixed, moving))


@theorem("norm-rank", "this project", "affine_rank", "lower")
def norm_rank(facts: Facts) -> Evaluation:
    """affine rank after a norm >= before - 1 (LayerNorm - 2) - zero gains"""
    bounds, measured = [], []
    for layer in facts.layers:
        norms = [norm for half in layer.halves for norm in half.ranks]
        before, after, loss = min(norms, key=lambda norm: norm[1] - norm[0] + norm[2], default=(0, 0, 0))
        bounds.append(log(max(0, before - loss)))
        measured.append(log(after) if norms else math.nan)
    fixed = [needs.softmax(facts.arch), needs.at_least("norms in a layer", facts.arch.norm != "none", 1)]
    return Evaluation(bounds, by_layer(facts, fixed), measured)

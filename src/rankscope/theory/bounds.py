"""Bounds from above (Dong et al. 2021, measured factors) and from below (skips, unreached directions, ranks).

**Above**: collapse is doubly exponential, and MLPs and skips slow it. In the measure
`||A|| = sqrt(||A||_1 ||A||_inf)`, which has no triangle inequality, so that column and row sums are bounded apart.
Proofs step by step: docs/theory.md.

**Pure attention** (Thm 2.2, Thm 2.3): L layers of H heads without skips, MLPs and norms, with R the deviation of X,

    ||res(SAN(X))|| <= (4 gamma beta H / sqrt d_qk)^((3^L - 1)/2) ||res(X)||^(3^L),
    beta = sqrt(max_h ||W_QK,h||_1 ||W_h||_1 * max_h ||W_QK,h||_1 ||W_h||_inf),
    gamma = max(1, (e^o - 1) / (2 o)),   o = max |E_ij - E_ij'|,   E = R W_QK R^T / sqrt d_qk.

gamma is measured from the entries that attention is made of, and 1 as long as o <= 1.2564, the root of e^x = 1 + 2x.
With gamma = 1 beyond that the bound is FALSE for large n (`rankscope_studies.hand_built`). About the mean instead of
the minimising centre the base has one more factor `2 (1 - 1/n)`.

**MLPs** (Cor 3.2) with skip weight m multiply the base by lambda, the root of the product of

    |m| + Lip(act) ||W_1||_1 ||W_2||_1   and   |m| + Lip(act) ||W_1||_inf ||W_2||_inf.

A gated MLP, a product of two functions of the token, has no Lipschitz constant.

**Skips** (after section 3) of weight w: `||res(w X + SA(X))|| <= |w| r + c r^3`, r = ||res X||, layer by layer, with

    c = 4 gamma beta H / sqrt d_qk,   beta = max_h ||W_QK,h||_1 max(||W_h||_1, ||W_h||_inf).

An upper bound only: the skip keeps tokens apart, and lower bounds are below.

**Measured factors** of pure attention, from loose to exact. A head multiplies the deviation R by `M_h = P_h - 1 q^T`
for any row q, since rows of P sum to one:

    ||res(SA(X))|| <= f ||R||,   f = sqrt((sum_h ||M_h||_1 ||W_h||_1) (sum_h ||M_h||_inf ||W_h||_inf)).

- **oscillation**: `|P_ij - p_j| <= p_j (e^{osc_i} - 1)`, osc_i the range of row i of E, however large scores are.
- **attention**: M_h as measured, q the mean row.
- **exact**: `||sum_h M_h R W_h|| / ||R||` as measured: the residual computed another way, whose slack is rounding.

Bounds at layer l are products of l factors (times kappa, where |P - 1 p^T| is about p and the residual about the mean).

**Any block** (Dobrushin 1956; LayerNorm, MLP). `D(X)` is the largest distance between two tokens. Averages
with weights `P_i` and `P_j` differ by at most `tau(P) D`, tau half the largest L1 distance of two rows, in
any norm. So, with whatever mask and positions,

    D(sum_h P_h X W_h) <= (sum_h tau_h ||W_h||_2) D(X),    D(w X + branch) <= (|w| + its factor) D(X),
    D(norm X) <= (max|gain| / min sd) D(X),                 sd over these tokens,
    D(MLP X) <= Lip(act) ||W_1||_2 ||W_2||_2 D(X)           (gated: with the largest gate and value of these).

The product over the parts of a block bounds D wherever attention averages. For trained transformers it is vacuous.

**Below**: what skips keep apart, what no branch can write to, what norms leave of the rank.

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
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from rankscope.deviation import LOWEST, Scaled
from rankscope.theory.logs import log, log_expm1, minus, plus, product, sized, times
from rankscope.theory.theorem import (
    Evaluation,
    Facts,
    HalfFacts,
    Hypothesis,
    LayerFacts,
    Theorem,
    above,
    at_least,
    at_most,
    averaging_bound,
    by_layer,
    equal,
    refusal,
    theorem,
)
from rankscope.theory.weight_norms import EPS, lost, of_heads
from rankscope.theory.wu2024 import directions, of_one_length, one_length

ROOT = 1.2564  # e^x <= 1 + 2x up to here (the root is 1.25643...)


def log_gamma(layer: LayerFacts) -> float:
    """log of `max(1, (e^o - 1) / (2 o))`."""
    o = layer.log_oscillation
    return 0.0 if o == -math.inf else max(0.0, log_expm1(o) - math.log(2) - o)


def log_base(facts: Facts, layer: LayerFacts, gamma: float) -> float:
    """log of `4 kappa gamma beta H / sqrt d_qk`, kappa from the centre, beta the safe one of Thm 2.3."""
    fixed = math.log(4 * max(1, len(layer.heads.scores)) / facts.arch.divisor)
    columns, rows = layer.heads.log_beta
    return times(fixed, facts.inflation, gamma, times(0.5 * columns, 0.5 * rows))


def cubed(bases: list[float], start: float) -> list[float]:
    """log of `base_l^((3^l - 1)/2) start^(3^l)` for l = 1.., base_l the largest of the first l."""
    largest = np.array(list(accumulate(bases, lambda largest, base: max(base, largest))))
    logs = np.full(len(largest), start)
    with np.errstate(over="ignore", invalid="ignore"):
        for layer in range(len(largest)):
            base, r = largest[layer:], logs[layer:]
            # Rounded up: what is lost here is cubed by every layer to come.
            up = base + 3 * r + 4 * EPS * (np.abs(base) + np.abs(3 * r))
            logs[layer:] = np.where((base == -np.inf) | (r == -np.inf), -np.inf, up)
            finite = logs > -np.inf
            logs = np.where(finite, np.clip(logs, LOWEST, None), logs)
            logs = np.where(logs > -LOWEST, np.inf, logs)
    return [float(log_bound) for log_bound in logs]


def attention_hypotheses(facts: Facts) -> list[Hypothesis]:
    """What the cubing needs of attention, whatever stands beside it."""
    views = equal("different sets of tokens that tokens see", facts.distinct_views, 1)
    return [*facts.premises.token_scores, views]


def _pure(facts: Facts, gamma_is_one: bool, heads: int | None) -> Evaluation:
    fixed = [*facts.premises.pure_attention, *attention_hypotheses(facts)]
    if heads is not None:
        most = max((len(layer.heads.scores) for layer in facts.layers), default=0)
        fixed.append(equal("heads", most, heads))
    if refused := refusal(facts, fixed):
        return refused
    bases = [log_base(facts, layer, 0.0 if gamma_is_one else log_gamma(layer)) for layer in facts.layers]
    checked = [facts.averaging]
    if gamma_is_one:
        logs = [layer.log_oscillation for layer in facts.layers]
        so_far = [
            math.nan if any(map(math.isnan, logs[:upto])) else max(logs[:upto]) for upto in range(1, facts.depth + 1)
        ]
        sizes = [math.exp(min(size, 700.0)) for size in so_far]
        checked.append([at_most("largest |E_ij - E_ij'| so far", size, ROOT, measured=True) for size in sizes])
    return Evaluation(cubed(bases, facts.sizes[0].residual), by_layer(facts, fixed, *checked))


SAYS = "||res|| <= (4 gamma beta H / sqrt d)^((3^L - 1)/2) ||res X||^(3^L)"
PURE = [
    Theorem(name, f"Dong et al. 2021, {source}", f"{SAYS}, {case}", "residual", "upper", evaluate)
    for name, source, case, evaluate in (
        ("dong2021-2.2", "Thm 2.2", "one head, gamma measured", lambda facts: _pure(facts, False, heads=1)),
        ("dong2021-2.3", "Thm 2.3", "gamma measured", lambda facts: _pure(facts, False, heads=None)),
        ("dong2021-2.3-gamma1", "Thm 2.3 with gamma = 1", "gamma = 1", lambda facts: _pure(facts, True, heads=None)),
    )
]
"""Of pure attention: Thm 2.2, Thm 2.3, and Thm 2.3 with gamma = 1."""


@theorem("dong2021-3.2", "Dong et al. 2021, Cor 3.2", "residual", "upper")
def with_mlp(facts: Facts) -> Evaluation:
    """||res|| <= (4 gamma beta H lambda / sqrt d)^((3^L - 1)/2) ||res X||^(3^L), lambda of the MLPs"""
    arch, bases = facts.arch, []
    fixed = [
        facts.premises.no_skip,
        facts.premises.no_norm,
        at_least("MLPs in a layer", arch.mlp != "none", 1),
        equal("MLPs that are gated", arch.mlp in ("gated", "experts"), 0),
        equal("branches that run in parallel", arch.parallel, 0),
        *attention_hypotheses(facts),
    ]
    if refused := refusal(facts, fixed):
        return refused
    m = abs(arch.mlp_skip)
    for layer in facts.layers:
        log_lipschitz = 0.5 * (log(m + layer.mlp.columns) + log(m + layer.mlp.rows))
        bases.append(times(log_base(facts, layer, log_gamma(layer)), log_lipschitz))
    return averaging_bound(facts, cubed(bases, facts.sizes[0].residual), fixed)


@theorem("dong2021-skip", "after Dong et al. 2021, section 3", "residual", "upper")
def with_skip(facts: Facts) -> Evaluation:
    """||res|| <= |w| r + (4 gamma beta H / sqrt d) r^3 at every layer, r the bound before"""
    arch, r, bounds = facts.arch, facts.sizes[0].residual, []
    skip = above("|weight of the skip around attention|", abs(arch.attention_skip), 0)
    fixed = [skip, facts.premises.no_mlp, facts.premises.no_norm, *attention_hypotheses(facts)]
    if refused := refusal(facts, fixed):
        return refused
    for layer in facts.layers:
        fixed_part = log(4 * len(layer.heads.scores) / arch.divisor)
        c = times(fixed_part, facts.inflation, log_gamma(layer), max(layer.heads.log_beta))
        r = plus(times(log(abs(arch.attention_skip)), r), times(c, times(r, r, r)))
        bounds.append(r)
    return averaging_bound(facts, bounds, fixed)


CENTRED = {"mean": 0.0, "argmin": 2e-5}
"""What a residual may be above the smallest, which linear programmes find to 1e-5: a quotient is off by as much."""


def _by_factors(facts: Facts, factors: list[float], of_attention: list[Hypothesis]) -> Evaluation:
    fixed = [*facts.premises.pure_attention, *of_attention]
    return refusal(facts, fixed) or averaging_bound(facts, product(facts.sizes[0].residual, factors), fixed)


@theorem("oscillation", "this project", "residual", "upper")
def oscillation(facts: Facts) -> Evaluation:
    """||res|| <= product of sqrt(sum ||p (e^osc - 1)|| ||W_h||), always"""
    factors = [times(layer.log_oscillation_factor, facts.inflation) for layer in facts.layers]
    return _by_factors(facts, factors, attention_hypotheses(facts))


@theorem("attention-factors", "this project", "residual", "upper")
def attention(facts: Facts) -> Evaluation:
    """||res|| <= product of sqrt(sum ||P_h - mean row|| ||W_h||)"""
    return _by_factors(facts, [layer.log_attention_factor for layer in facts.layers], [facts.premises.averages])


@theorem("exact-factors", "this project", "residual", "upper")
def exact(facts: Facts) -> Evaluation:
    """||res|| = product of ||sum (P_h - 1q) R W_h|| / ||R||"""
    factors = [layer.log_exact_factor + CENTRED[facts.centre] for layer in facts.layers]
    return _by_factors(facts, factors, [facts.premises.softmax])


def branches_recorded(facts: Facts) -> list[Hypothesis]:
    """A kernel without a rule in deviation arithmetic shows its branches only where nothing else is there."""
    arch = facts.arch
    return [] if arch.norm == "none" and arch.mlp == "none" else [facts.premises.softmax]


@theorem("dobrushin", "Dobrushin 1956, extended to blocks by this project", "diameter", "upper")
def dobrushin(facts: Facts) -> Evaluation:
    """largest distance <= product of (|w| + sum tau_h ||W_h||_2), max|gain| / min sd, Lip(MLP)"""
    factors = [times(*(half.log_stretch for half in layer.halves)) for layer in facts.layers]
    factors = [math.inf if math.isnan(factor) else factor for factor in factors]
    bounds = product(facts.sizes[0].diameter, factors)
    return averaging_bound(facts, bounds, [facts.premises.averages, *branches_recorded(facts)])


def _skips(facts: Facts, factor: Callable[[HalfFacts[float]], float]) -> Evaluation:
    fixed = [above("|weight| of the skips", min(facts.premises.skips), 0), *branches_recorded(facts)]
    factors = []
    for layer in facts.layers:
        factors.append(times(*map(factor, layer.halves), *[half.log_norm for half in layer.halves]))
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
    width = facts.arch.width
    weight = math.prod(facts.premises.skips)
    fixed = [
        above("|weight| of the skips", weight, 0),
        equal("norms after a skip's sum", facts.premises.normed_sums, 0),
        equal("norms after a branch", facts.premises.normed_branches, 0),
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
    unreached = [above("directions that no branch writes to", float(count), 0) for count in left]
    return Evaluation(bounds, by_layer(facts, fixed, unreached))


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
        facts.premises.softmax,
        facts.premises.no_mlp,
        above("|weight of the skip|", w, 0),
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
    says = "longest token of a branch, in lengths of a token"
    short = [at_most(says, size, w, measured=True) for size in largest]
    return Evaluation(bounds, by_layer(facts, fixed, short, of_one_length(facts)))


@theorem("norm-rank", "this project", "affine_rank", "lower")
def norm_rank(facts: Facts) -> Evaluation:
    """affine rank after a norm >= before - 1 (LayerNorm - 2) - zero gains"""
    bounds, measured = [], []
    for layer in facts.layers:
        norms = [norm for half in layer.halves for norm in half.ranks]
        before, after, loss = min(norms, key=lambda norm: norm[1] - norm[0] + norm[2], default=(0, 0, 0))
        bounds.append(log(max(0, before - loss)))
        measured.append(log(after) if norms else math.nan)
    fixed = [facts.premises.softmax, at_least("norms in a layer", facts.arch.norm != "none", 1)]
    return Evaluation(bounds, by_layer(facts, fixed), measured)

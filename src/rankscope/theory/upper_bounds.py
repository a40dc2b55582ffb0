"""Upper bounds: Dong et al. 2021 (doubly exponential; MLPs and skips slow it), and products of measured factors.

In the measure `||A|| = sqrt(||A||_1 ||A||_inf)`, which has no triangle inequality, so that column and row sums are
bounded apart. Proofs step by step: docs/theory.md.

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

An upper bound only: the skip keeps tokens apart, and lower bounds are in `lower_bounds.py`.

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
"""

import math
from itertools import accumulate

import numpy as np

from rankscope.deviation import LOWEST
from rankscope.theory import theorem as needs
from rankscope.theory.facts import Facts, LayerFacts
from rankscope.theory.logs import log, log_expm1, plus, times
from rankscope.theory.theorem import (
    Evaluation,
    Hypothesis,
    Theorem,
    averaging,
    averaging_bound,
    by_layer,
    refusal,
    theorem,
)
from rankscope.theory.weight_norms import EPS

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
    views = needs.equal("different sets of tokens that tokens see", facts.distinct_views, 1)
    return [*needs.token_scores(facts.arch), views]


def _pure(facts: Facts, gamma_is_one: bool, heads: int | None) -> Evaluation:
    fixed = [*needs.pure_attention(facts.arch), *attention_hypotheses(facts)]
    if heads is not None:
        most = max((len(layer.heads.scores) for layer in facts.layers), default=0)
        fixed.append(needs.equal("heads", most, heads))
    if refused := refusal(facts, fixed):
        return refused
    bases = [log_base(facts, layer, 0.0 if gamma_is_one else log_gamma(layer)) for layer in facts.layers]

    def moving(upto: int) -> list[Hypothesis]:
        hypotheses = averaging(facts, upto)
        if gamma_is_one:
            logs = [layer.log_oscillation for layer in facts.layers[:upto]]
            size = math.nan if any(map(math.isnan, logs)) else math.exp(min(max(logs), 700.0))
            hypotheses.append(needs.at_most("largest |E_ij - E_ij'| so far", size, ROOT, measured=True))
        return hypotheses

    return Evaluation(cubed(bases, facts.sizes[0].residual), by_layer(facts, fixed, moving))


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
        needs.no_skip(arch),
        needs.no_norm(arch),
        needs.at_least("MLPs in a layer", arch.mlp != "none", 1),
        needs.equal("MLPs that are gated", arch.mlp in ("gated", "experts"), 0),
        needs.equal("branches that run in parallel", arch.parallel, 0),
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
    skip = needs.above("|weight of the skip around attention|", abs(arch.attention_skip), 0)
    fixed = [skip, needs.no_mlp(arch), needs.no_norm(arch), *attention_hypotheses(facts)]
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


def product(start: float, factors: list[float]) -> list[float]:
    """Logs of the products of the first 1, 2, .. factors with the start."""

    def longer(r: float, factor: float) -> float:
        return math.nan if math.isnan(factor) else times(r, factor)

    return [*accumulate(factors, longer, initial=start)][1:]


def _by_factors(facts: Facts, factors: list[float], of_attention: list[Hypothesis]) -> Evaluation:
    fixed = [*needs.pure_attention(facts.arch), *of_attention]
    return refusal(facts, fixed) or averaging_bound(facts, product(facts.sizes[0].residual, factors), fixed)


@theorem("oscillation", "this project", "residual", "upper")
def oscillation(facts: Facts) -> Evaluation:
    """||res|| <= product of sqrt(sum ||p (e^osc - 1)|| ||W_h||), always"""
    factors = [times(layer.log_oscillation_factor, facts.inflation) for layer in facts.layers]
    return _by_factors(facts, factors, attention_hypotheses(facts))


@theorem("attention-factors", "this project", "residual", "upper")
def attention(facts: Facts) -> Evaluation:
    """||res|| <= product of sqrt(sum ||P_h - mean row|| ||W_h||)"""
    return _by_factors(facts, [layer.log_attention_factor for layer in facts.layers], [needs.averages(facts.arch)])


@theorem("exact-factors", "this project", "residual", "upper")
def exact(facts: Facts) -> Evaluation:
    """||res|| = product of ||sum (P_h - 1q) R W_h|| / ||R||"""
    factors = [layer.log_exact_factor + CENTRED[facts.centre] for layer in facts.layers]
    return _by_factors(facts, factors, [needs.softmax(facts.arch)])


def branches_recorded(facts: Facts) -> list[Hypothesis]:
    """A kernel without a rule in deviation arithmetic shows its branches only where nothing else is there."""
    arch = facts.arch
    return [] if arch.norm == "none" and arch.mlp == "none" else [needs.softmax(arch)]


@theorem("dobrushin", "Dobrushin 1956, extended to blocks by this project", "diameter", "upper")
def dobrushin(facts: Facts) -> Evaluation:
    """largest distance <= product of (|w| + sum tau_h ||W_h||_2), max|gain| / min sd, Lip(MLP)"""
    factors = [times(*(half.log_stretch for half in layer.halves)) for layer in facts.layers]
    factors = [math.inf if math.isnan(factor) else factor for factor in factors]
    bounds = product(facts.sizes[0].diameter, factors)
    return averaging_bound(facts, bounds, [needs.averages(facts.arch), *branches_recorded(facts)])

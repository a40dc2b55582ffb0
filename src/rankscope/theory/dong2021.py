"""Upper bounds of Dong et al. 2021: pure attention loses rank doubly exponentially, MLPs and skips slow it.

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
"""

import math
from itertools import accumulate

import numpy as np

from rankscope.deviation import LOWEST
from rankscope.theory import hypotheses as needs
from rankscope.theory.facts import Facts, LayerFacts
from rankscope.theory.hypotheses import Hypothesis
from rankscope.theory.logs import log, log_expm1, plus, times
from rankscope.theory.theorem import Evaluation, Theorem, averaging, averaging_bound, by_layer, refusal, theorem
from rankscope.theory.weight_norms import EPS

ROOT = 1.2564  # e^x <= 1 + 2x up to here (the root is 1.25643...)


def log_gamma(layer: LayerFacts) -> float:
    """log of `max(1, (e^o - 1) / (2 o))`."""
    o = layer.log_oscillation
    return 0.0 if o == -math.inf else max(0.0, log_expm1(o) - math.log(2) - o)


def log_beta(layer: LayerFacts) -> float:
    """log of the safe beta of Thm 2.3."""
    columns, rows = layer.heads.log_beta
    return times(0.5 * columns, 0.5 * rows)


def log_base(facts: Facts, layer: LayerFacts, gamma: float) -> float:
    """log of `4 kappa gamma beta H / sqrt d_qk`, kappa from the centre."""
    head_count = max(1, len(layer.heads.scores))
    fixed = math.log(4 * head_count / facts.arch.divisor)
    return times(fixed, facts.inflation, gamma, log_beta(layer))


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


def log_lipschitz(facts: Facts, layer: LayerFacts) -> float:
    """log of lambda, the skip around the MLP included."""
    m = abs(facts.arch.mlp_skip)
    return 0.5 * (log(m + layer.mlp.columns) + log(m + layer.mlp.rows))


@theorem("dong2021-3.2", "Dong et al. 2021, Cor 3.2", "residual", "upper")
def with_mlp(facts: Facts) -> Evaluation:
    """||res|| <= (4 gamma beta H lambda / sqrt d)^((3^L - 1)/2) ||res X||^(3^L), lambda of the MLPs"""
    arch = facts.arch
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
    bases = [times(log_base(facts, layer, log_gamma(layer)), log_lipschitz(facts, layer)) for layer in facts.layers]
    return averaging_bound(facts, cubed(bases, facts.sizes[0].residual), fixed)


def log_cubic(facts: Facts, layer: LayerFacts) -> float:
    """log of c, with kappa from the centre."""
    if not len(layer.heads.scores):
        return -math.inf
    fixed = math.log(4 * len(layer.heads.scores) / facts.arch.divisor)
    return times(fixed, facts.inflation, log_gamma(layer), max(layer.heads.log_beta))


@theorem("dong2021-skip", "after Dong et al. 2021, section 3", "residual", "upper")
def with_skip(facts: Facts) -> Evaluation:
    """||res|| <= |w| r + (4 gamma beta H / sqrt d) r^3 at every layer, r the bound before"""
    arch, r, bounds = facts.arch, facts.sizes[0].residual, []
    skip = needs.above("|weight of the skip around attention|", abs(arch.attention_skip), 0)
    fixed = [skip, needs.no_mlp(arch), needs.no_norm(arch), *attention_hypotheses(facts)]
    if refused := refusal(facts, fixed):
        return refused
    for layer in facts.layers:
        r = plus(times(log(abs(arch.attention_skip)), r), times(log_cubic(facts, layer), times(r, r, r)))
        bounds.append(r)
    return averaging_bound(facts, bounds, fixed)

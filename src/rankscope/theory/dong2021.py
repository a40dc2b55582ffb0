"""Upper bounds of Dong et al. 2021: pure attention loses rank doubly exponentially, MLPs and skips slow it.

**Pure attention** (Thm 2.2, Thm 2.3). One layer of H heads without skips, MLPs and norms, in the measure
`||A|| = sqrt(||A||_1 ||A||_inf)`:

    ||res(SA(X))|| <= (4 gamma beta H / sqrt d_qk) ||res(X)||^3,
    ||res(SAN(X))|| <= (4 gamma beta H / sqrt d_qk)^((3^L - 1)/2) ||res(X)||^(3^L).

**beta.** The measure has no triangle inequality, so column and row sums are bounded apart:
`beta = sqrt(max_h ||W_QK,h||_1 ||W_h||_1 * max_h ||W_QK,h||_1 ||W_h||_inf)`.

**gamma.** With `E = R W_QK R^T / sqrt d_qk` and p the attention of the centre,

    |P_ij - p_j| <= p_j sum_k p_k expm1(|E_ij - E_ik|),   expm1(x) <= 2 gamma x for x <= o,
    gamma = max(1, (e^o - 1) / (2 o)),   o = max |E_ij - E_ij'|:

always valid, measured from the entries that attention is made of, and 1 as long as o <= 1.2564, the root of
e^x = 1 + 2x. With gamma = 1 beyond that the bound is FALSE for large n (`hand_built.py`). Derivation:
docs/theory.md. About the mean instead of the minimising centre the base has one more factor `2 (1 - 1/n)`.

**MLPs** (Cor 3.2) multiply the base by a Lipschitz constant. For `Y = 1 y^T + R`, an MLP with skip weight m
acts on every token alone, and its output deviates from that of y by at most, in column sums and in row sums,

    (|m| + Lip(act) ||W_1||_1 ||W_2||_1) ||R||_1   and   (|m| + Lip(act) ||W_1||_inf ||W_2||_inf) ||R||_inf,

so `lambda = sqrt` of the product of the two factors does for the composite measure, and

    ||res|| <= (4 gamma beta H lambda / sqrt d_qk)^((3^L - 1)/2) ||res X||^(3^L).

A gated MLP, a product of two functions of the token, has no Lipschitz constant.

**Skips** (after section 3). With a skip of weight w, `res(w X + SA(X))` is at most
`|w| r + c r^3`, r = ||res X||,

    c = 4 gamma beta H / sqrt d_qk,   beta = max_h ||W_QK,h||_1 max(||W_h||_1, ||W_h||_inf).

(Column and row sums of the sum of two matrices are bounded apart; the larger of the two betas does for both.)
Iterated layer by layer this is, for |w| <= 1, never above the closed form that follows from
`a + b <= 2 max(a, b)`:

    max over l <= L of (2 c)^((3^l - 1)/2) 2^(3^l (L - l)) r^(3^l).

An upper bound only: the skip keeps tokens apart, and lower bounds are in `lower_bounds.py`.
"""

import math

import numpy as np

from rankscope.deviation.scaled import LOWEST
from rankscope.theory.facts import Facts, LayerFacts
from rankscope.theory.hypotheses import (
    Hypothesis,
    above,
    at_least,
    at_most,
    equal,
    no_mlp,
    no_norm,
    no_skip,
    token_scores,
)
from rankscope.theory.logs import log, log_expm1, plus, running_maximum, times
from rankscope.theory.theorem import Evaluation, Theorem, averaging, by_layer
from rankscope.theory.weight_norms import EPS

ROOT = 1.2564
"""e^x <= 1 + 2x up to here (the root is 1.25643...)."""


def log_gamma(layer: LayerFacts) -> float:
    """log of `max(1, (e^o - 1) / (2 o))`."""
    o = layer.log_oscillation
    return 0.0 if o == -math.inf else max(0.0, log_expm1(o) - math.log(2) - o)


def log_beta(layer: LayerFacts) -> float:
    """log of the safe beta of Thm 2.3."""
    if not len(layer.heads.scores):
        return -math.inf
    scores, columns, rows = (part.log() for part in (layer.heads.scores, layer.heads.columns, layer.heads.rows))
    return times(0.5 * float((scores + columns).max()), 0.5 * float((scores + rows).max()))


def log_base(facts: Facts, layer: LayerFacts, gamma: float) -> float:
    """log of `4 kappa gamma beta H / sqrt d_qk`, kappa from the centre."""
    head_count = max(1, len(layer.heads.scores))
    fixed = math.log(4 * head_count / facts.arch.divisor)
    return times(fixed, facts.inflation, gamma, log_beta(layer))


def cubed(bases: list[float], start: float) -> list[float]:
    """log of `base_l^((3^l - 1)/2) start^(3^l)` for l = 1.., base_l the largest of the first l."""
    largest = np.array(running_maximum(bases))
    logs = np.full(len(largest), start)
    with np.errstate(over="ignore", invalid="ignore"):
        for layer in range(len(largest)):
            logs[layer:] = np.where(
                (largest[layer:] == -np.inf) | (logs[layer:] == -np.inf), -np.inf, _up(largest[layer:], logs[layer:])
            )
            finite = logs > -np.inf
            logs = np.where(finite, np.clip(logs, LOWEST, None), logs)
            logs = np.where(logs > -LOWEST, np.inf, logs)
    return [float(item) for item in logs]


def _up(base: np.ndarray, r: np.ndarray) -> np.ndarray:
    """`base + 3 r`, rounded up: what is lost here is cubed by every layer to come."""
    return base + 3 * r + 4 * EPS * (np.abs(base) + np.abs(3 * r))


def attention_hypotheses(facts: Facts) -> list[Hypothesis]:
    """What the cubing needs of attention, whatever stands beside it."""
    return [*token_scores(facts.arch), equal("different sets of tokens that tokens see", facts.distinct_views, 1)]


def _pure(facts: Facts, gamma_is_one: bool, heads: int | None) -> Evaluation:
    arch = facts.arch
    bases = [log_base(facts, layer, 0.0 if gamma_is_one else log_gamma(layer)) for layer in facts.layers]
    fixed = [no_skip(arch), no_mlp(arch), no_norm(arch), *attention_hypotheses(facts)]
    if heads is not None:
        fixed.append(equal("heads", max((len(item.heads.scores) for item in facts.layers), default=0), heads))

    def moving(upto: int) -> list[Hypothesis]:
        hypotheses = averaging(facts, upto)
        if gamma_is_one:
            logs = [layer.log_oscillation for layer in facts.layers[:upto]]
            size = math.nan if any(map(math.isnan, logs)) else math.exp(min(max(logs), 700.0))
            hypotheses.append(at_most("largest |E_ij - E_ij'| so far", size, ROOT, measured=True))
        return hypotheses

    return Evaluation(cubed(bases, facts.sizes[0].residual), by_layer(facts, fixed, moving))


SAYS = "||res|| <= (4 gamma beta H / sqrt d)^((3^L - 1)/2) ||res X||^(3^L)"
SINGLE = Theorem(
    "dong2021-2.2", "Dong et al. 2021, Thm 2.2", f"{SAYS}, one head, gamma measured", "residual", "upper",
    lambda facts: _pure(facts, gamma_is_one=False, heads=1),
)  # fmt: skip
SEVERAL = Theorem(
    "dong2021-2.3", "Dong et al. 2021, Thm 2.3", f"{SAYS}, gamma measured", "residual", "upper",
    lambda facts: _pure(facts, gamma_is_one=False, heads=None),
)  # fmt: skip
GAMMA_ONE = Theorem(
    "dong2021-2.3-gamma1", "Dong et al. 2021, Thm 2.3 with gamma = 1", f"{SAYS}, gamma = 1", "residual",
    "upper", lambda facts: _pure(facts, gamma_is_one=True, heads=None),
)  # fmt: skip


def log_lipschitz(facts: Facts, layer: LayerFacts) -> float:
    """log of lambda, the skip around the MLP included."""
    m = abs(facts.arch.mlp_skip)
    return 0.5 * (log(m + layer.mlp.columns) + log(m + layer.mlp.rows))


def _with_mlp(facts: Facts) -> Evaluation:
    arch = facts.arch
    gated = arch.mlp in ("gated", "experts")
    plain = Hypothesis("MLPs that are gated", float(gated), "= 0", not gated)
    fixed = [
        no_skip(arch),
        no_norm(arch),
        at_least("MLPs in a layer", arch.mlp != "none", 1),
        plain,
        equal("branches that run in parallel", arch.parallel, 0),
        *attention_hypotheses(facts),
    ]
    bases = [math.inf] * facts.depth
    if plain.met:
        bases = [
            times(log_base(facts, layer_facts, log_gamma(layer_facts)), log_lipschitz(facts, layer_facts))
            for layer_facts in facts.layers
        ]
    bounds = cubed(bases, facts.sizes[0].residual)
    return Evaluation(bounds, by_layer(facts, fixed, lambda upto: averaging(facts, upto)))


WITH_MLP = Theorem(
    "dong2021-3.2", "Dong et al. 2021, Cor 3.2",
    "||res|| <= (4 gamma beta H lambda / sqrt d)^((3^L - 1)/2) ||res X||^(3^L), lambda of the MLPs",
    "residual", "upper", _with_mlp,
)  # fmt: skip


def log_cubic(facts: Facts, layer: LayerFacts) -> float:
    """log of c, with kappa from the centre."""
    if not len(layer.heads.scores):
        return -math.inf
    wide = layer.heads.scores.log() + layer.heads.columns.maximum(layer.heads.rows).log()
    fixed = math.log(4 * len(layer.heads.scores) / facts.arch.divisor)
    return times(fixed, facts.inflation, log_gamma(layer), float(wide.max()))


def _with_skip(facts: Facts) -> Evaluation:
    arch, r = facts.arch, facts.sizes[0].residual
    bounds = []
    for layer in facts.layers:
        r = plus(times(log(abs(arch.attention_skip)), r), times(log_cubic(facts, layer), times(r, r, r)))
        bounds.append(r)
    fixed = [
        above("|weight of the skip around attention|", abs(arch.attention_skip), 0),
        no_mlp(arch),
        no_norm(arch),
        *attention_hypotheses(facts),
    ]
    return Evaluation(bounds, by_layer(facts, fixed, lambda upto: averaging(facts, upto)))


WITH_SKIP = Theorem(
    "dong2021-skip", "after Dong et al. 2021, section 3",
    "||res|| <= |w| r + (4 gamma beta H / sqrt d) r^3 at every layer, r the bound before",
    "residual", "upper", _with_skip,
)  # fmt: skip

"""Pure attention loses rank doubly exponentially (Dong et al. 2021, Thm 2.2, Thm 2.3).

One layer of H heads without skips, MLPs and norms, in the measure `||A|| = sqrt(||A||_1 ||A||_inf)`:

    ||res(SA(X))|| <= (4 gamma beta H / sqrt d_qk) ||res(X)||^3,
    ||res(SAN(X))|| <= (4 gamma beta H / sqrt d_qk)^((3^L - 1)/2) ||res(X)||^(3^L).

**beta.** The measure has no triangle inequality, so column and row sums are bounded apart:
`beta = sqrt(max_h ||W_QK,h||_1 ||W_h||_1 * max_h ||W_QK,h||_1 ||W_h||_inf)`.

**gamma.** With `E = R W_QK R^T / sqrt d_qk` and p the attention of the centre,

    |P_ij - p_j| <= p_j sum_k p_k expm1(|E_ij - E_ik|),   expm1(x) <= 2 gamma x for x <= o,
    gamma = max(1, (e^o - 1) / (2 o)),   o = max |E_ij - E_ij'|:

always valid, measured from the entries that attention is made of, and 1 as long as o <= 1.2564, the root of
e^x = 1 + 2x. With gamma = 1 beyond that the bound is FALSE for large n (`counterexample.py`). Derivation:
docs/theory.md.

About the mean instead of the minimising centre the base has one more factor `2 (1 - 1/n)`.
"""

import math

import numpy as np

from rankscope.deviation.scaled import LOWEST
from rankscope.theory.constants import EPS
from rankscope.theory.facts import Facts, LayerFacts
from rankscope.theory.hypotheses import (
    Hypothesis,
    at_most,
    equal,
    no_mlp,
    no_norm,
    no_skip,
    token_scores,
)
from rankscope.theory.logs import log_expm1, running_maximum, times
from rankscope.theory.theorem import Evaluation, Theorem, averaging, by_layer

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
    scores, columns, rows = (
        part.log() for part in (layer.heads.scores, layer.heads.columns, layer.heads.rows)
    )
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
                (largest[layer:] == -np.inf) | (logs[layer:] == -np.inf),
                -np.inf,
                _up(largest[layer:], logs[layer:]),
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
    return [
        *token_scores(facts.arch),
        equal("different sets of tokens that tokens see", facts.distinct_views, 1),
    ]


def _evaluate(facts: Facts, gamma_is_one: bool, heads: int | None) -> Evaluation:
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
    lambda facts: _evaluate(facts, gamma_is_one=False, heads=1),
)  # fmt: skip
SEVERAL = Theorem(
    "dong2021-2.3", "Dong et al. 2021, Thm 2.3", f"{SAYS}, gamma measured", "residual", "upper",
    lambda facts: _evaluate(facts, gamma_is_one=False, heads=None),
)  # fmt: skip
GAMMA_ONE = Theorem(
    "dong2021-2.3-gamma1", "Dong et al. 2021, Thm 2.3 with gamma = 1", f"{SAYS}, gamma = 1", "residual",
    "upper", lambda facts: _evaluate(facts, gamma_is_one=True, heads=None),
)  # fmt: skip

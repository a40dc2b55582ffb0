"""Upper bounds by measured factors: pure attention from loose to exact, and any block after Dobrushin.

**Pure attention.** A head multiplies the deviation R by `M_h = P_h - 1 q^T` for any row q, since rows of P sum to one:

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

from rankscope.theory.dong2021 import attention_hypotheses
from rankscope.theory.facts import Facts
from rankscope.theory.hypotheses import Hypothesis, averages, pure_attention, softmax
from rankscope.theory.logs import times
from rankscope.theory.theorem import Evaluation, averaging_bound, refusal, theorem

CENTRED = {"mean": 0.0, "argmin": 2e-5}
"""What a residual may be above the smallest, which linear programmes find to 1e-5: a quotient is off by as much."""


def product(start: float, factors: list[float]) -> list[float]:
    """Logs of the products of the first 1, 2, .. factors with the start."""
    products, r = [], start
    for factor in factors:
        r = times(r, factor) if not math.isnan(factor) else math.nan
        products.append(r)
    return products


def _by_factors(facts: Facts, factors: list[float], of_attention: list[Hypothesis]) -> Evaluation:
    fixed = [*pure_attention(facts.arch), *of_attention]
    return refusal(facts, fixed) or averaging_bound(facts, product(facts.sizes[0].residual, factors), fixed)


@theorem("oscillation", "this project", "residual", "upper")
def oscillation(facts: Facts) -> Evaluation:
    """||res|| <= product of sqrt(sum ||p (e^osc - 1)|| ||W_h||), always"""
    factors = [times(layer.log_oscillation_factor, facts.inflation) for layer in facts.layers]
    return _by_factors(facts, factors, attention_hypotheses(facts))


@theorem("attention-factors", "this project", "residual", "upper")
def attention(facts: Facts) -> Evaluation:
    """||res|| <= product of sqrt(sum ||P_h - mean row|| ||W_h||)"""
    return _by_factors(facts, [layer.log_attention_factor for layer in facts.layers], [averages(facts.arch)])


@theorem("exact-factors", "this project", "residual", "upper")
def exact(facts: Facts) -> Evaluation:
    """||res|| = product of ||sum (P_h - 1q) R W_h|| / ||R||"""
    factors = [layer.log_exact_factor + CENTRED[facts.centre] for layer in facts.layers]
    return _by_factors(facts, factors, [softmax(facts.arch)])


def branches_recorded(facts: Facts) -> list[Hypothesis]:
    """A kernel without a rule in deviation arithmetic shows its branches only where nothing else is there."""
    arch = facts.arch
    return [] if arch.norm == "none" and arch.mlp == "none" else [softmax(arch)]


@theorem("dobrushin", "Dobrushin 1956, extended to blocks by this project", "diameter", "upper")
def dobrushin(facts: Facts) -> Evaluation:
    """largest distance <= product of (|w| + sum tau_h ||W_h||_2), max|gain| / min sd, Lip(MLP)"""
    factors = [times(*(half.log_stretch for half in layer.halves)) for layer in facts.layers]
    factors = [math.inf if math.isnan(factor) else factor for factor in factors]
    bounds = product(facts.sizes[0].diameter, factors)
    return averaging_bound(facts, bounds, [averages(facts.arch), *branches_recorded(facts)])

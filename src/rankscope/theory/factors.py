"""Pure attention by measured factors: three bounds of the same form, from loose to exact.

A head multiplies the deviation R by `M_h = P_h - 1 q^T` for any row q, since rows of P sum to one:
`res(SA(X)) <- sum_h M_h R W_h`. In column sums and row sums apart,

    ||res(SA(X))|| <= f ||R||,   f = sqrt((sum_h ||M_h||_1 ||W_h||_1) (sum_h ||M_h||_inf ||W_h||_inf)).

- **oscillation**: `|P_ij - p_j| <= p_j (e^{osc_i} - 1)`, osc_i the range of row i of E. From scores alone,
  without a condition on their size.
- **attention**: M_h as measured, q the mean row.
- **exact**: `||sum_h M_h R W_h|| / ||R||` as measured. The product is the residual itself, computed another
  way: it closes the ladder, and its slack is rounding.

Bounds at layer l are products of the first l factors (times kappa, where |P - 1 p^T| is about p and the
residual about the mean).
"""

import math
from collections.abc import Callable

from rankscope.theory.facts import Facts, LayerFacts
from rankscope.theory.hypotheses import Hypothesis, averages, no_mlp, no_norm, no_skip, softmax
from rankscope.theory.logs import times
from rankscope.theory.pure_attention import attention_hypotheses
from rankscope.theory.theorem import Evaluation, Theorem, averaging, by_layer

CENTRED = {"mean": 0.0, "argmin": 2e-5}
"""What a residual may be above the smallest, which linear programmes find to 1e-5: a quotient is off by as
much."""


def product(start: float, factors: list[float]) -> list[float]:
    """Logs of the products of the first 1, 2, .. factors with the start."""
    products, r = [], start
    for factor in factors:
        r = times(r, factor) if not math.isnan(factor) else math.nan
        products.append(r)
    return products


def _evaluate(
    facts: Facts, factor: Callable[[LayerFacts], float], of_attention: list[Hypothesis]
) -> Evaluation:
    arch = facts.arch
    fixed = [no_skip(arch), no_mlp(arch), no_norm(arch), *of_attention]
    bounds = product(facts.sizes[0].residual, [factor(layer) for layer in facts.layers])
    return Evaluation(bounds, by_layer(facts, fixed, lambda upto: averaging(facts, upto)))


OSCILLATION = Theorem(
    "oscillation", "this project", "||res|| <= product of sqrt(sum ||p (e^osc - 1)|| ||W_h||), always",
    "residual", "upper",
    lambda facts: _evaluate(
        facts, lambda layer: times(layer.log_oscillation_factor, facts.inflation), attention_hypotheses(facts)
    ),
)  # fmt: skip
ATTENTION = Theorem(
    "attention-factors", "this project", "||res|| <= product of sqrt(sum ||P_h - mean row|| ||W_h||)",
    "residual", "upper",
    lambda facts: _evaluate(facts, lambda layer: layer.log_attention_factor, [averages(facts.arch)]),
)  # fmt: skip
EXACT = Theorem(
    "exact-factors", "this project", "||res|| = product of ||sum (P_h - 1q) R W_h|| / ||R||",
    "residual", "upper",
    lambda facts: _evaluate(
        facts, lambda layer: layer.log_exact_factor + CENTRED[facts.centre], [softmax(facts.arch)]
    ),
)  # fmt: skip

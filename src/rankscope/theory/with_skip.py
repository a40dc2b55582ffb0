"""How far skips can let the residual grow: the upper bound for attention with skips (after Dong et al. 2021).

With a skip of weight w, `res(w X + SA(X))` is at most `|w| r + c r^3`, r = ||res X||, and

    c = 4 gamma beta H / sqrt d_qk,   beta = max_h ||W_QK,h||_1 max(||W_h||_1, ||W_h||_inf).

(Column and row sums of the sum of two matrices are bounded apart; the larger of the two betas does for both.)
Iterated layer by layer this is, for |w| <= 1, never above the closed form that follows from
`a + b <= 2 max(a, b)`:

    max over l <= L of (2 c)^((3^l - 1)/2) 2^(3^l (L - l)) r^(3^l).

An upper bound only: the skip keeps tokens apart, and lower bounds are in `skip_lower.py`.
"""

import math

from rankscope.theory.facts import Facts, LayerFacts
from rankscope.theory.hypotheses import above, no_mlp, no_norm
from rankscope.theory.logs import log, plus, times
from rankscope.theory.pure_attention import attention_hypotheses, log_gamma
from rankscope.theory.theorem import Evaluation, Theorem, averaging, by_layer


def log_cubic(facts: Facts, layer: LayerFacts) -> float:
    """log of c, with kappa from the centre."""
    if not len(layer.heads.scores):
        return -math.inf
    wide = layer.heads.scores.log() + layer.heads.columns.maximum(layer.heads.rows).log()
    fixed = math.log(4 * len(layer.heads.scores) / facts.arch.divisor)
    return times(fixed, facts.inflation, log_gamma(layer), float(wide.max()))


def _evaluate(facts: Facts) -> Evaluation:
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
    "residual", "upper", _evaluate,
)  # fmt: skip

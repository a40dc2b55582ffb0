"""MLPs slow the collapse (Dong et al. 2021, Cor 3.2): the base of Thm 2.3 times a Lipschitz constant.

For `Y = 1 y^T + R`, an MLP with skip weight m acts on every token alone, and its output deviates from that of
y by at most, in column sums and in row sums,

    (|m| + Lip(act) ||W_1||_1 ||W_2||_1) ||R||_1   and   (|m| + Lip(act) ||W_1||_inf ||W_2||_inf) ||R||_inf,

so `lambda = sqrt` of the product of the two factors does for the composite measure, and

    ||res|| <= (4 gamma beta H lambda / sqrt d_qk)^((3^L - 1)/2) ||res X||^(3^L).

A gated MLP, a product of two functions of the token, has no Lipschitz constant.
"""

import math

from rankscope.theory.facts import Facts, LayerFacts
from rankscope.theory.hypotheses import Hypothesis, at_least, equal, no_norm, no_skip
from rankscope.theory.logs import log, times
from rankscope.theory.pure_attention import attention_hypotheses, cubed, log_base, log_gamma
from rankscope.theory.theorem import Evaluation, Theorem, averaging, by_layer


def log_lipschitz(facts: Facts, layer: LayerFacts) -> float:
    """log of lambda, the skip around the MLP included."""
    m = abs(facts.arch.mlp_skip)
    return 0.5 * (log(m + layer.mlp.columns) + log(m + layer.mlp.rows))


def _evaluate(facts: Facts) -> Evaluation:
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
    "residual", "upper", _evaluate,
)  # fmt: skip

"""Any block by measured factors: how far apart two tokens can be after it (Dobrushin 1956; LayerNorm, MLP).

`D(X)` is the largest distance between two tokens. Averages with weights `P_i` and `P_j` differ by at most
`tau(P) D`, tau half the largest L1 distance of two rows, in any norm. So, with whatever mask and positions,

    D(sum_h P_h X W_h) <= (sum_h tau_h ||W_h||_2) D(X), D(w X + branch) <= (|w| + its factor) D(X), D(norm
    X) <= (max|gain| / min sd) D(X),           sd over these tokens, D(MLP X) <= Lip(act) ||W_1||_2
    ||W_2||_2 D(X)     (gated: with the largest gate and value of these tokens).

The product over the parts of a block bounds D at every layer of every architecture whose attention averages.
Bounds of weights by their norms make it loose: for trained transformers it is vacuous, and called so.
"""

import math

from rankscope.theory.factors import product
from rankscope.theory.facts import Facts
from rankscope.theory.hypotheses import Hypothesis, averages, softmax
from rankscope.theory.logs import times
from rankscope.theory.theorem import Evaluation, Theorem, averaging, by_layer


def seen(facts: Facts) -> list[Hypothesis]:
    """A kernel without a rule in deviation arithmetic shows its branches only where nothing else is there."""
    arch = facts.arch
    return [] if arch.norm == "none" and arch.mlp == "none" else [softmax(arch)]


def _evaluate(facts: Facts) -> Evaluation:
    factors = [times(*(half.log_stretch for half in layer.halves)) for layer in facts.layers]
    factors = [math.inf if math.isnan(factor) else factor for factor in factors]
    fixed, bounds = [averages(facts.arch), *seen(facts)], product(facts.sizes[0].diameter, factors)
    return Evaluation(bounds, by_layer(facts, fixed, lambda upto: averaging(facts, upto)))


DOBRUSHIN = Theorem(
    "dobrushin", "Dobrushin 1956, extended to blocks by this project",
    "largest distance <= product of (|w| + sum tau_h ||W_h||_2), max|gain| / min sd, Lip(MLP)",
    "diameter", "upper", _evaluate,
)  # fmt: skip

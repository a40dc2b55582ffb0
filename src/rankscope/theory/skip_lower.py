"""When collapse is excluded: lower bounds for blocks whose skips are not followed by a norm.

`X' = w X + branch(X)`, R the deviation of X about the mean, F that of the branch, in the Frobenius norm:

    ||w R + F|| >= (|w| - c) ||R||,    c = ||F|| / ||R||            (elementary: the triangle inequality)
    ||w R + F|| >= |w + a| ||R||,      a = <F, R> / ||R||^2         (aligned: Cauchy and Schwarz)

c and a are measured. The second is never below the first, since |a| <= c, and needs no small branch: a branch
that turns tokens without shrinking them costs nothing. Attention and MLP halves multiply.
"""

from collections.abc import Callable

from rankscope.theory.dobrushin import seen
from rankscope.theory.factors import product
from rankscope.theory.facts import Facts, HalfFacts
from rankscope.theory.hypotheses import above, no_norm_after
from rankscope.theory.logs import log, minus, times
from rankscope.theory.theorem import Evaluation, Theorem, by_layer


def _evaluate(facts: Facts, factor: Callable[[HalfFacts], float]) -> Evaluation:
    arch = facts.arch
    weights = [abs(arch.attention_skip)]
    if arch.mlp != "none" and not arch.parallel:
        weights.append(abs(arch.mlp_skip))
    fixed = [above("|weight| of the skips", min(weights), 0), no_norm_after(arch), *seen(facts)]
    factors = [times(*(factor(half) for half in layer.halves)) for layer in facts.layers]
    return Evaluation(product(facts.sizes[0].mu, factors), by_layer(facts, fixed))


ELEMENTARY = Theorem(
    "elementary-skip", "this project", "mu >= product of (|w| - c), c the measured gain of the branch",
    "mu", "lower",
    lambda facts: _evaluate(facts, lambda half: minus(log(abs(half.weight)), half.log_gain)),
)  # fmt: skip
ALIGNED = Theorem(
    "aligned-skip", "this project", "mu >= product of |w + a|, a = <F, R> / ||R||^2 of the branch",
    "mu", "lower",
    lambda facts: _evaluate(facts, lambda half: log(abs(half.weight + half.alignment))),
)  # fmt: skip

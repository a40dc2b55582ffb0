"""When collapse is excluded: lower bounds for blocks with skips.

`X' = norm(w X + branch(X))`, R the deviation of X about the mean, F that of the branch, in Frobenius norms:

    ||w R + F|| >= (|w| - c) ||R||,    c = ||F|| / ||R||            (elementary: the triangle inequality)
    ||w R + F|| >= |w + a| ||R||,      a = <F, R> / ||R||^2         (aligned: Cauchy and Schwarz)

c and a are measured. The second is never below the first, since |a| <= c, and needs no small branch: a branch
that turns tokens without shrinking them costs nothing. A norm after the sum U multiplies by its measured
`n = ||res(norm U)|| / ||res(U)||`. Attention and MLP halves multiply.
"""

from collections.abc import Callable

from rankscope.theory.dobrushin import seen
from rankscope.theory.factors import product
from rankscope.theory.facts import Facts, HalfFacts
from rankscope.theory.hypotheses import above, skips
from rankscope.theory.logs import log, minus, times
from rankscope.theory.theorem import Evaluation, Theorem, by_layer


def _evaluate(facts: Facts, factor: Callable[[HalfFacts], float]) -> Evaluation:
    fixed = [above("|weight| of the skips", min(skips(facts.arch)), 0), *seen(facts)]
    factors = [
        times(*(log_factor for half in layer.halves for log_factor in (factor(half), half.log_norm)))
        for layer in facts.layers
    ]
    return Evaluation(product(facts.sizes[0].mu, factors), by_layer(facts, fixed))


ELEMENTARY = Theorem(
    "elementary-skip", "this project", "mu >= product of (|w| - c) n, c and n measured",
    "mu", "lower",
    lambda facts: _evaluate(facts, lambda half: minus(log(abs(half.weight)), half.log_gain)),
)  # fmt: skip
ALIGNED = Theorem(
    "aligned-skip", "this project", "mu >= product of |w + a| n, a and n measured",
    "mu", "lower",
    lambda facts: _evaluate(facts, lambda half: log(abs(half.weight + half.alignment))),
)  # fmt: skip

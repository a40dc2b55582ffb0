"""Skips under a norm: a lower bound for `Y' = norm(w Y + Z)` (as lambda-skip, Joseph et al. 2025).

Tokens y_i of one length, here 1, the branch z_i of length at most s < |w|, Z's deviation at most c times
Y's in the Frobenius norm. With `u = w y + z`, whose lengths can differ by the branch alone,

    |y'_i - y'_j|^2 = (|u_i - u_j|^2 - (|u_i| - |u_j|)^2) / (|u_i| |u_j|),
    ||u_i| - |u_j|| <= (|w| s |y_i - y_j| + (|w| + s) |z_i - z_j|) / (|w| - s).

Summed over pairs (Minkowski), `sum |z_i - z_j|^2 <= c^2 sum |y_i - y_j|^2`, and every |u_i| <= |w| + s:

    mu(Y')^2 >= [(|w| - c)^2 - ((|w| s + (|w| + s) c) / (|w| - s))^2] / (|w| + s)^2  mu(Y)^2.

Gains that change from layer to layer change the length of tokens, and mu with it. LayerNorm centres: Y is
centred already, and centring Z makes neither s nor c larger.

For |w| well above s and c the factor is about `1 - (2 s + c) / |w|`: collapse is at most exponential, at
a rate that the weight sets. s and c are measured. The statement and its constants are this project's.
"""

import math

from rankscope.theory.facts import Facts
from rankscope.theory.hypotheses import Hypothesis, above, at_most, no_mlp, softmax
from rankscope.theory.logs import log, times
from rankscope.theory.sphere import of_one_length, one_length
from rankscope.theory.theorem import Evaluation, Theorem, by_layer


def log_factor(w: float, s: float, c: float) -> float:
    """log of the factor of mu; -inf where it says nothing.

    >>> math.exp(log_factor(1.0, 0.0, 0.0)), log_factor(1.0, 1.0, 0.5)
    (1.0, -inf)
    """
    if s >= w or c >= w:
        return -math.inf
    lengths = (w * s + (w + s) * c) / (w - s)
    square = (w - c) ** 2 - lengths**2
    return 0.5 * log(square) - math.log(w + s)


def _evaluate(facts: Facts) -> Evaluation:
    arch = facts.arch
    w = abs(arch.attention_skip)
    r = facts.sizes[1].mu
    bounds: list[float] = []
    largest: list[float] = []
    for index, layer in enumerate(facts.layers):
        length = facts.sizes[index].longest
        half = layer.halves[0]
        s = math.exp(min(half.log_longest - length, 700.0)) if index else 0.0
        if index:  # layer 1 is where tokens first are of one length
            grown = facts.sizes[index + 1].longest - length if length > -math.inf else -math.inf
            r = times(r, grown, log_factor(w, s, math.exp(min(half.log_gain, 700.0))))
        bounds.append(r)
        largest.append(max(s, largest[-1] if largest else 0.0))
    fixed = [softmax(arch), no_mlp(arch), above("|weight of the skip|", w, 0)]
    fixed += one_length(facts, centring=True)

    def moving(upto: int) -> list[Hypothesis]:
        return [
            at_most("longest token of a branch, in lengths of a token", largest[upto - 1], w, measured=True),
            of_one_length(facts, upto),
        ]

    return Evaluation(bounds, by_layer(facts, fixed, moving))


LAMBDA_SKIP = Theorem(
    "lambda-skip", "this project, in the setting of Joseph et al. 2025",
    "mu' >= sqrt((w-c)^2 - ((w s + (w+s) c)/(w-s))^2) / (w+s) mu under a norm", "mu", "lower", _evaluate,
)  # fmt: skip

"""Norms are neutral to rank, but for one or two (affine-rank neutrality of LayerNorm).

A norm multiplies rows by positive numbers, `D X`, which keeps the rank of X. The affine rank (of X - 1
mean^T) is the rank or one less, for X as for D X, so a norm that only scales moves it by at most one.
LayerNorm centres each token first, `X C`, which takes at most one more away. A gain that is zero
somewhere takes one each; biases move all tokens alike. So, for every norm in a block,

    affine rank after >= affine rank before - 1   (scale, rms),   - 2   (layer),   - zero gains.

A norm cannot make tokens that span many directions uniform, however it is scaled; nor can it put many back.
"""

import math

from rankscope.theory.facts import Facts
from rankscope.theory.hypotheses import at_least, softmax
from rankscope.theory.logs import log
from rankscope.theory.theorem import Evaluation, Theorem, by_layer


def _evaluate(facts: Facts) -> Evaluation:
    bounds, measured = [], []
    for layer in facts.layers:
        norms = [norm for half in layer.halves for norm in half.ranks]
        before, after, loss = min(norms, key=lambda norm: norm[1] - norm[0] + norm[2], default=(0, 0, 0))
        bounds.append(log(max(0, before - loss)))
        measured.append(log(after) if norms else math.nan)
    fixed = [softmax(facts.arch), at_least("norms in a layer", facts.arch.norm != "none", 1)]
    return Evaluation(bounds, by_layer(facts, fixed), measured)


NEUTRAL = Theorem(
    "norm-rank", "this project", "affine rank after a norm >= before - 1 (LayerNorm - 2) - zero gains",
    "affine_rank", "lower", _evaluate,
)  # fmt: skip

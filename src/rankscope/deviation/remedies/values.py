"""Rules of the remedies on values (`nets/remedies/values.py`) on states: common values and deviations alike,
V_1 carried as both."""

from dataclasses import replace
from typing import Any

from rankscope.deviation.attention import HeadOutputs, Values
from rankscope.deviation.scaled import Scaled
from rankscope.nets.remedies.values import FIRST, OWN, Drawn, ValueResidual, first, speaks


def value_residual(remedy: ValueResidual, V: Values, block: Any, rules: Any, inside: Any) -> Values:
    """`a V + b V_1`."""
    V_1 = first(block, rules, V)
    if block.index == 0:
        return V
    numbers = block.weights.parts[remedy.name]
    return replace(
        V,
        x=_summed(V.x, V_1.x, numbers["a"], numbers["b"]),
        R=_summed(V.R, V_1.R, numbers["a"], numbers["b"]),
    )


def drawn(part: Drawn, said: HeadOutputs, block: Any, rules: Any, inside: Any) -> HeadOutputs:
    """`weight (V_1 - V)` more, of the heads that speak."""
    V, V_1 = rules.memory.pop(OWN), rules.memory[FIRST]
    if block.index == 0:
        return said
    heard = part.weight * speaks(block, rules).to(V.x.log)
    x, R = (_summed(v_1, v, heard, -heard) for v_1, v in ((V_1.x, V.x), (V_1.R, V.R)))
    return replace(said, x=said.x + x, R=said.R + R)


def _summed(one: Scaled, other: Scaled, a: Any, b: Any) -> Scaled:
    """`a one + b other`, numbers of all heads or one of each; zeros do not set the scale."""

    def weighed(part: Scaled, number: Any) -> Scaled:
        shaped = number.reshape(-1, *[1] * (part.value.ndim - 2))
        return part.mapped(lambda v: v * shaped).normalised()

    return weighed(one, a) + weighed(other, b)

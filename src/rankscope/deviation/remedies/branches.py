"""Rules of the remedies on branches (`nets/remedies/branches.py`) on states."""

from typing import Any

from rankscope.deviation.state import State
from rankscope.nets.remedies.branches import Weight


def weighted(part: Weight, state: State, block: Any, rules: Any, inside: Any) -> State:
    """Common token and deviations alike."""
    number = part.number(block)
    x, R = (each.mapped(lambda v: v * number).normalised() for each in (state.x, state.R))
    return State(x, R, state.valid)

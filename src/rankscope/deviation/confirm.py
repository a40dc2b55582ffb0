"""A pass in doubled precision beside the one in float64: what both say is confirmed, to as many digits.

Where they do not agree, float64 was not enough, and the question is whether 32 digits were: from there on the
doubled pass is run a second time, shaken by more than its own rounding can have grown to: `MARGIN` times what
float64's has, brought down from 16 digits to 32.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rankscope.deviation.perturbation import Perturbation, PerturbedDeviation
from rankscope.deviation.propagate import DeviationStep, PassInputs, propagate, restored, rounded
from rankscope.deviation.rules import Deviation
from rankscope.deviation.second_pass import distance, lost
from rankscope.deviation.state import State
from rankscope.nets import Transformer
from rankscope.nets.traversal import traverse
from rankscope.shapes import Bool

MARGIN = 100.0
EPS = torch.finfo(torch.float64).eps


class _Pass:
    """The doubled pass, and the second one from where it was first needed."""

    def __init__(self, net: Transformer, X: Tensor, padding: Tensor | None) -> None:
        self.given = PassInputs.of(net, X, padding, doubled=True)
        self.rules = Deviation(self.given.net.arch, self.given.settings)
        self.shaken = PerturbedDeviation(self.given.net.arch, self.given.settings)
        self.state = self.given.state
        self.second: State | None = None

    def stepped(self, index: int, rules: Deviation, state: State) -> DeviationStep:
        return DeviationStep(index + 1, *traverse(self.given.block(index), rules, state))


@dataclass(frozen=True)
class Confirmation:
    """One layer of both passes, tokens where they stood."""

    doubled: DeviationStep
    """Of the doubled pass, rounded to float64."""
    single: DeviationStep
    """Of the pass in float64."""
    lost: Bool[Tensor, " batch"]
    """Whether a token has left the range of numbers beside the others: more digits do not help."""
    passes: _Pass
    before: State
    """Tokens of the doubled pass before this layer."""
    grown: float
    """How far float64's tokens were from them."""

    @cached_property
    def again(self) -> DeviationStep:
        """Of the second doubled pass, rounded; asking for it starts it."""
        passes, index = self.passes, self.doubled.layer - 1
        if index < 0:
            return self.doubled
        if passes.second is None:
            most = MARGIN * max(self.grown, EPS) * EPS
            passes.second = Perturbation(most=min(most, 1e-12)).of(self.before)
            passes.shaken.memory = dict(passes.rules.memory)  # of the layers before
        step = passes.stepped(index, passes.shaken, passes.second)
        passes.second = step.state
        return rounded(restored(step, passes.given.order))


def confirmations(net: Transformer, X: Tensor, padding: Tensor | None = None) -> Iterator[Confirmation]:
    """Every layer in float64 and in doubled precision."""
    passes = _Pass(net, X, padding)
    gone = torch.zeros(len(X), dtype=torch.bool, device=passes.given.net.device)
    earlier, grown = None, 0.0
    for single in propagate(net, X, padding):
        before = passes.state
        step = DeviationStep(0, before, None)
        if single.layer:
            step = passes.stepped(single.layer - 1, passes.rules, before)
            passes.state = step.state
        found = rounded(restored(step, passes.given.order))
        gone = gone if earlier is None else gone | lost(earlier, found.state)
        earlier = found.state
        here = Confirmation(found, single, gone, passes, before, grown)
        yield here
        apart = distance(found.state, single.state)
        grown = max(grown, float(apart.max()) if len(apart) else 0.0)
        if passes.second is not None:
            _ = here.again  # once begun, it goes on with every layer

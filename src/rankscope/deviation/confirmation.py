"""Confirms in doubled precision what float64 says: `measure(..., confirm=True)`, by way of `profiles/measuring.py`.

Digits on which a pass of 32 digits and the one in float64 agree are confirmed. Layer by layer,
`confirmations` runs the rules in float64 with their second pass and on `Doubled` tensors. Where the two do not agree,
or float64's own second pass marks a reading, float64 was not enough, and the question is whether 32 digits were: from
there on a second doubled pass runs, perturbed by more than the rounding of the first can have grown to: `MARGIN` times
what float64's has, brought down from 16 digits to 32. Both precisions may agree on what neither holds, such as what two
tokens differ by at 1e-70 of their size. `Confirmation.lost` looks in doubled precision for what no comparison shows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rankscope.deviation import comparison
from rankscope.deviation.perturbation import TORN, Perturbation, PerturbedDeviation, WatchedDeviation
from rankscope.deviation.propagate import DeviationStep, PassInputs, restored, rounded, run_block
from rankscope.deviation.proved_zeros import UnprovedZeros, zeros_of_layer
from rankscope.deviation.second_pass import DeviationSecondPass, undecided_attention, with_second_pass
from rankscope.deviation.state import State
from rankscope.nets import Transformer
from rankscope.shapes import Bool

MARGIN = 100.0
EPS = torch.finfo(torch.float64).eps


class _DoubledPasses:
    """The doubled pass, and the perturbed one from the layer where it was first needed."""

    def __init__(self, net: Transformer, X: Tensor, padding: Tensor | None) -> None:
        self.inputs = PassInputs.of(net, X, padding, doubled=True)
        self.rules = WatchedDeviation(self.inputs.net.arch, self.inputs.settings, TORN * EPS)
        self.perturbed_rules = PerturbedDeviation(self.inputs.net.arch, self.inputs.settings)
        self.state = self.inputs.state
        self.perturbed_state: State | None = None  # the state of the perturbed pass; None until it starts


@dataclass(frozen=True)
class Confirmation:
    """One layer in float64 and in doubled precision, tokens in their original order."""

    doubled: DeviationStep  # the layer of the doubled pass, rounded to float64
    single: DeviationStep  # the layer of the pass in float64
    second: DeviationSecondPass  # the layer of float64's second pass
    lost_before: Bool[Tensor, " batch"]  # `lost` of the layer before
    passes: _DoubledPasses
    before: State  # the doubled pass's tokens before this layer
    after: DeviationStep  # the layer of the doubled pass as it is, valid tokens first
    grown: float  # the largest distance of float64's tokens from them so far

    @cached_property
    def zeros(self) -> UnprovedZeros:
        """Which samples and heads hold a zero that is rounding, in 32 digits too."""
        passes, step = self.passes, self.after
        if not step.layer:
            return UnprovedZeros.none(self.before, passes.inputs.net.arch.heads)
        block = passes.inputs.block(step.layer - 1)
        return zeros_of_layer(block, passes.rules, self.before, step, block.active_heads)

    @cached_property
    def lost(self) -> Bool[Tensor, " batch"]:
        """True where nothing is known of the sample from this layer on, in 32 digits either: what
        `DeviationSecondPass.lost` is of float64."""
        lost = self.lost_before | self.zeros.samples | self.passes.rules.losses.torn
        return lost | undecided_attention(self.after, lambda: self.perturbed_inside)

    @cached_property
    def perturbed(self) -> DeviationStep:
        """The layer of the perturbed doubled pass, rounded to float64; the first use starts that pass. Tokens are
        perturbed in float64 too: metrics are read off rounded ones, and some see digits that rounding takes away."""
        step = rounded(restored(self.perturbed_inside, self.passes.inputs.order))
        return step._replace(state=Perturbation().of(step.state))

    @cached_property
    def perturbed_inside(self) -> DeviationStep:
        """The layer of the perturbed doubled pass as it is, valid tokens first."""
        passes, index = self.passes, self.doubled.layer - 1
        if index < 0:
            return self.after
        if passes.perturbed_state is None:
            share = MARGIN * max(self.grown, EPS) * EPS
            passes.perturbed_state = Perturbation(largest_share=min(share, 1e-12)).of(self.before)
            passes.perturbed_rules.carried = dict(passes.rules.carried)  # of the layers before
        step = run_block(passes.inputs.block(index), passes.perturbed_rules, passes.perturbed_state)
        passes.perturbed_state = step.state
        return step


def confirmations(net: Transformer, X: Tensor, padding: Tensor | None = None) -> Iterator[Confirmation]:
    """Yields every layer in float64 and in doubled precision."""
    passes = _DoubledPasses(net, X, padding)
    lost = torch.zeros(len(X), dtype=torch.bool, device=passes.inputs.net.device)
    grown = 0.0
    for single, second in with_second_pass(PassInputs.of(net, X, padding), floats=False):
        assert isinstance(single, DeviationStep) and isinstance(second, DeviationSecondPass)
        before = passes.state
        step = DeviationStep(0, before, None)
        if single.layer:
            step = run_block(passes.inputs.block(single.layer - 1), passes.rules, before)
            passes.state = step.state
        doubled = rounded(restored(step, passes.inputs.order))
        confirmation = Confirmation(doubled, single, second, lost, passes, before, step, grown)
        lost = confirmation.lost
        yield confirmation
        distances = comparison.state_distance(doubled.state, single.state)
        grown = max(grown, float(distances.max()) if len(distances) else 0.0)
        if passes.perturbed_state is not None:
            _ = confirmation.perturbed_inside  # once started, it runs every layer

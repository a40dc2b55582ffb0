"""How far passes over the same samples agree, layer by layer: the pass itself, its perturbed copies, and float64.

Called by `observation.py`; what is made of the numbers is in `rounding.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from rankscope.deviation import DeviationPattern, State, must_compute
from rankscope.deviation.comparison import attends_elsewhere, state_distance, steep_scores, tokens_lost, undecided
from rankscope.theory.facts import Number, PerSample
from rankscope.theory.float64_pass import FollowedStates


@dataclass(frozen=True)
class Agreement(Generic[Number]):
    """How far perturbed copies and float64 agree with the pass itself on the tokens after a layer."""

    difference: Number  # Of the copies' tokens, the largest, as `state_distance` has it
    float64_difference: Number
    """How far float64's deviation is from this one, as a share of it, where float64 can see."""
    lost: Number  # Whether a token that was not zero before the layer is too short after it
    undecided: Number  # Whether a copy disagrees on the order of steep scores
    elsewhere: Number  # Whether a copy attends to other tokens by steep scores


def agreement(
    before: State, passes: Sequence[State], of_patterns: tuple[Tensor, Tensor], by_float64: FollowedStates | None = None
) -> Agreement[PerSample]:
    """The agreement on the tokens after a layer.

    Args:
        before: The tokens before the layer.
        passes: The tokens after it, of the pass itself and of each copy.
        of_patterns: The `pattern_agreement` of the layer.
        by_float64: The tokens after it beside those of float64, if that sees any.
    """
    first, *copies = passes
    difference = float64_difference = torch.zeros_like(first.log)
    for copy in copies:
        difference = torch.maximum(difference, state_distance(first, copy))
    if by_float64 is not None:
        float64_difference = state_distance(by_float64.state, by_float64.float64)
        float64_difference = float64_difference.masked_fill(~by_float64.followed, 0.0)
    return Agreement(difference, float64_difference, tokens_lost(before, first), *of_patterns)


def pattern_agreement(patterns: Sequence[DeviationPattern]) -> tuple[Tensor, Tensor]:
    """(`undecided`, `elsewhere`) of an `Agreement`, from the attention pattern of the pass itself and of each copy."""
    first, *copies = patterns
    # Two tensors, so that layers with steep scores and without have one form and are read together.
    differ, attend = torch.zeros(2, len(first.p), dtype=torch.bool, device=first.p.device).unbind()
    if copies and must_compute("agreement.steep", steep_scores(first).any()):
        for copy in copies:
            differ, attend = differ | undecided(first, copy), attend | attends_elsewhere(first, copy)
    return differ, attend

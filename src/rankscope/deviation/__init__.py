"""Deviation arithmetic: a network at any depth, to full relative precision of what its tokens differ by."""

from rankscope.deviation.attention import DeviationPattern
from rankscope.deviation.decisions import at_layer, can_skip, must_compute
from rankscope.deviation.dissect import BlockRecord, HalfRecord, dissect
from rankscope.deviation.propagate import DeviationStep, PassInputs, applies, finish, propagate, rounded, without_rule
from rankscope.deviation.rules import Deviation
from rankscope.deviation.scaled import LOWEST, Scaled
from rankscope.deviation.second_pass import Confirmation, DeviationSecondPass, FloatSecondPass, confirmations
from rankscope.deviation.state import State

__all__ = [
    "BlockRecord", "Confirmation", "Deviation", "DeviationPattern", "DeviationSecondPass", "DeviationStep",
    "FloatSecondPass", "HalfRecord", "LOWEST", "PassInputs", "Scaled", "State", "applies", "at_layer", "can_skip",
    "confirmations", "dissect", "finish", "must_compute", "propagate", "rounded", "without_rule",
]  # fmt: skip

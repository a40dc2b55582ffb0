"""Deviation arithmetic: a network at any depth, to full relative precision of what its tokens differ by."""

from rankscope.deviation.attention import DeviationPattern
from rankscope.deviation.dissect import BlockRecord, HalfRecord, dissect
from rankscope.deviation.propagate import DeviationStep, applies, finish, propagate, rounded, without_rule
from rankscope.deviation.rules import Deviation
from rankscope.deviation.scaled import Scaled
from rankscope.deviation.state import State

__all__ = [
    "BlockRecord", "Deviation", "DeviationPattern", "DeviationStep", "HalfRecord", "Scaled", "State", "applies",
    "dissect", "finish", "propagate", "rounded", "without_rule",
]  # fmt: skip

"""Deviation arithmetic: a network at any depth, to full relative precision of what its tokens differ by."""

from rankscope.deviation.propagate import DeviationStep, applies, finish, propagate
from rankscope.deviation.scaled import Scaled
from rankscope.deviation.state import State

__all__ = ["DeviationStep", "Scaled", "State", "applies", "finish", "propagate"]

"""Deviation arithmetic: a network at any depth, to full relative precision of what its tokens differ by."""

from rankscope.deviation.block import Block, Half
from rankscope.deviation.propagate import KERNELS, DeviationStep, applies, dissect, finish, propagate
from rankscope.deviation.scaled import Scaled
from rankscope.deviation.state import State

__all__ = [
    "KERNELS",
    "Block",
    "DeviationStep",
    "Half",
    "Scaled",
    "State",
    "applies",
    "dissect",
    "finish",
    "propagate",
]

"""What is proved about token uniformity, next to what is measured."""

from rankscope.theory.catalogue import THEOREMS
from rankscope.theory.certify import Certificates, certify
from rankscope.theory.critical import CriticalSkip, critical_skip
from rankscope.theory.depth import CollapseDepth, collapse_depth
from rankscope.theory.facts import Facts
from rankscope.theory.hand_built import anisotropy_bound, equilibrium
from rankscope.theory.hypotheses import Hypothesis
from rankscope.theory.theorem import Evaluation, Theorem, by_layer

__all__ = [
    "THEOREMS", "Certificates", "CollapseDepth", "CriticalSkip", "Evaluation", "Facts", "Hypothesis",
    "Theorem", "anisotropy_bound", "by_layer", "certify", "collapse_depth", "critical_skip", "equilibrium",
]  # fmt: skip

"""What is proved about token uniformity, next to what is measured."""

from rankscope.theory import logs
from rankscope.theory.certificates import THEOREMS, Certificates, certify, theorems_named
from rankscope.theory.critical import CriticalSkip, critical_skip
from rankscope.theory.depth import CollapseDepth, collapse_depth
from rankscope.theory.facts import Facts
from rankscope.theory.figures import BoundView
from rankscope.theory.observation import observe
from rankscope.theory.readings import norm_stretch
from rankscope.theory.theorem import Evaluation, Hypothesis, Theorem, by_layer, outside
from rankscope.theory.transverse import slope, transverse_exponent, transverse_modes
from rankscope.theory.upper_bounds import log_base, log_gamma
from rankscope.theory.weight_norms import LayerNorms, MLPNorms, WeightNorms

__all__ = [
    "BoundView", "Certificates", "CollapseDepth", "CriticalSkip", "Evaluation", "Facts", "Hypothesis", "LayerNorms",
    "MLPNorms", "THEOREMS", "Theorem", "WeightNorms", "by_layer", "certify", "collapse_depth", "critical_skip",
    "log_base", "log_gamma", "logs", "norm_stretch", "observe", "outside", "slope", "theorems_named",
    "transverse_exponent", "transverse_modes",
]  # fmt: skip

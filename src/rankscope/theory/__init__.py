"""What is proved about token uniformity, next to what is measured."""

from rankscope.theory import logs
from rankscope.theory.bounds import log_base, log_gamma
from rankscope.theory.certificates import THEOREMS, Certificates, CertifyOptions, certify, theorems_named
from rankscope.theory.critical import CriticalSkip, critical_skip
from rankscope.theory.depth import CollapseDepth, collapse_depth, depth_of
from rankscope.theory.figures import (
    EXACT,
    RANK,
    BoundView,
    bound_views,
    bounds_chart,
    bounds_section,
    bounds_sentence,
    failing_table,
    proved_shares,
    quantity,
)
from rankscope.theory.observation import observe
from rankscope.theory.readings import norm_stretch
from rankscope.theory.theorem import Evaluation, Facts, Hypothesis, Theorem, by_layer, outside
from rankscope.theory.transverse import slope, transverse_exponent, transverse_modes
from rankscope.theory.weight_norms import LayerNorms, MLPNorms, WeightNorms

__all__ = [
    "BoundView", "Certificates", "CertifyOptions", "CollapseDepth", "CriticalSkip", "EXACT", "Evaluation", "Facts",
    "Hypothesis", "LayerNorms", "MLPNorms", "RANK", "THEOREMS", "Theorem", "WeightNorms", "bound_views", "bounds_chart",
    "bounds_section", "bounds_sentence", "by_layer", "certify", "collapse_depth", "critical_skip", "depth_of",
    "failing_table", "log_base", "log_gamma", "logs", "norm_stretch", "observe", "outside", "proved_shares", "quantity",
    "slope", "theorems_named", "transverse_exponent", "transverse_modes",
]  # fmt: skip

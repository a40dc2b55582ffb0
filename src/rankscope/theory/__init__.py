"""What is proved about token uniformity, next to what is measured."""

from rankscope.theory.catalogue import THEOREMS
from rankscope.theory.certificates import Certificates
from rankscope.theory.certify import certify
from rankscope.theory.critical import CriticalSkip, critical_skip
from rankscope.theory.depth import CollapseDepth, collapse_depth
from rankscope.theory.equilibria import anisotropy_bound, equilibrium

__all__ = [
    "THEOREMS",
    "Certificates",
    "CollapseDepth",
    "CriticalSkip",
    "anisotropy_bound",
    "certify",
    "collapse_depth",
    "critical_skip",
    "equilibrium",
]

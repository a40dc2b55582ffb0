"""What is proved about token uniformity, next to what is measured.

Axes of the tensors of this room are those of `nets` (`batch`, `token`, `width`, `head`), with these:

- `batch` also counts perturbed copies: all samples, then the first copy of each, and so on; where layers are read
  together, the samples of each layer one after the other. `PerSample` is `[batch]`, `PerHead` `[batch, head]`.
- `head`: active heads of a layer alone, in norms of weights and numbers of attention.
- `layer`: blocks in order; sizes of tokens have one entry more, the input's, as the first.
- `number`: numbers that leave a device together, one row each. `mode`: eigenvalues of averaging over a mask.
- `rows`, `columns`: of a matrix of weights, whose norms are taken.
"""

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

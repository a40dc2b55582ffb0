"""Numbers that say how uniform tokens are: pure functions of tensors, batched and padding-aware."""

from rankscope.metrics.attention import (
    dobrushin,
    entropy,
    first_token_mass,
    row_sum_defect,
    second_singular_value,
    spectral_gap,
)
from rankscope.metrics.catalogue import METRICS, Metric, Reading, metric
from rankscope.metrics.cosine import mean_abs_cosine, mean_cosine, min_cosine
from rankscope.metrics.residual import (
    composite_norm,
    high_frequency_share,
    max_residual,
    mu,
    relative_max_residual,
    relative_mu,
    relative_residual,
    relative_spectral_residual,
    residual,
    spectral_residual,
)
from rankscope.metrics.spectrum import (
    affine_rank,
    effective_rank,
    numerical_rank,
    participation_ratio,
    sigma_min,
    singular_values,
    stable_rank,
)

__all__ = [
    "METRICS",
    "Metric",
    "Reading",
    "affine_rank",
    "composite_norm",
    "dobrushin",
    "effective_rank",
    "entropy",
    "first_token_mass",
    "high_frequency_share",
    "max_residual",
    "mean_abs_cosine",
    "mean_cosine",
    "metric",
    "min_cosine",
    "mu",
    "numerical_rank",
    "participation_ratio",
    "relative_max_residual",
    "relative_mu",
    "relative_residual",
    "relative_spectral_residual",
    "residual",
    "row_sum_defect",
    "second_singular_value",
    "sigma_min",
    "singular_values",
    "spectral_gap",
    "spectral_residual",
    "stable_rank",
]

"""Numbers that say how uniform tokens are: pure functions of tensors, batched and padding-aware."""

from rankscope.metrics.attention import (
    dobrushin,
    effective_keys,
    entropy,
    first_token_mass,
    largest_logit,
    row_sum_defect,
    second_singular_value,
    spectral_gap,
)
from rankscope.metrics.catalogue import METRICS, MetricsLike, chosen_metrics, direction_of, is_share, metric, symbol_of
from rankscope.metrics.cosine import cosines, max_cosine_gap, mean_abs_cosine, mean_cosine, mean_cosine_gap, min_cosine
from rankscope.metrics.metric import ROUNDING, Meaning, Metric, Of, Reading
from rankscope.metrics.residuals import (
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
from rankscope.metrics.routing import expert_entropy, expert_load
from rankscope.metrics.rows import PatternRows, RowStatistics
from rankscope.metrics.spectrum import (
    affine_rank,
    effective_rank,
    numerical_rank,
    participation_ratio,
    residual_effective_rank,
    residual_singular_ratio,
    residual_stable_rank,
    sigma_min,
    singular_values,
    stable_rank,
)
from rankscope.metrics.token_norms import composite_norm, frobenius_norm
from rankscope.metrics.tokens import Tokens, Values, tokens_of, unit_of, valid_tokens

__all__ = [
    "METRICS", "Meaning", "Metric", "MetricsLike", "Of", "PatternRows", "ROUNDING", "Reading", "RowStatistics",
    "Tokens", "Values", "affine_rank", "chosen_metrics", "composite_norm", "cosines", "direction_of", "dobrushin",
    "effective_keys", "effective_rank", "entropy", "expert_entropy", "expert_load", "first_token_mass",
    "frobenius_norm", "high_frequency_share", "is_share", "largest_logit", "max_cosine_gap", "max_residual",
    "mean_abs_cosine", "mean_cosine", "mean_cosine_gap", "metric", "min_cosine", "mu", "numerical_rank",
    "participation_ratio", "relative_max_residual", "relative_mu", "relative_residual", "relative_spectral_residual",
    "residual", "residual_effective_rank", "residual_singular_ratio", "residual_stable_rank", "row_sum_defect",
    "second_singular_value", "sigma_min", "singular_values", "spectral_gap", "spectral_residual", "stable_rank",
    "symbol_of", "tokens_of", "unit_of", "valid_tokens",
]  # fmt: skip

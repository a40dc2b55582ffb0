"""Numbers that say how uniform tokens are: pure functions of tensors, batched and padding-aware.

The axes of the tensors that pass through this room:

- `*batch`: any axes in front, as of samples and layers; a metric gives one number for each of their entries;
- `token`: the tokens of a sample, padding included (`padding` is True there); in samples.py, `sample` in its place;
- `width`: the entries of a token;
- `head`: the heads of an attention layer, from 0;
- `row`: a query, and `column` a key, of an attention pattern `[*batch, head, token, token]`;
- `expert`: the experts of a mixture, from 0.
"""

from rankscope.metrics.attention import (
    FEW,
    defect_of_rows,
    dobrushin,
    effective_keys,
    entropy,
    entropy_of_rows,
    first_token_mass,
    first_token_of_rows,
    largest_logit,
    row_sum_defect,
    second_singular_value,
    spectral_gap,
)
from rankscope.metrics.base import (
    ROUNDING,
    Meaning,
    Metric,
    Of,
    Reading,
    Readings,
    Tokens,
    Values,
    from_statistics,
    tokens,
    tokens_of,
    unit_of,
    valid_tokens,
)
from rankscope.metrics.catalogue import METRICS, MetricsLike, chosen_metrics, direction_of, is_share, metric, symbol_of
from rankscope.metrics.cosine import cosines, max_cosine_gap, mean_abs_cosine, mean_cosine, mean_cosine_gap, min_cosine
from rankscope.metrics.log_readings import FARTHEST, SMALLEST, UNIT
from rankscope.metrics.norms import composite_norm, frobenius_norm, largest_square_distance, largest_sum_distance
from rankscope.metrics.residuals import (
    NORMS,
    centred,
    from_norms,
    high_frequency_share,
    max_residual,
    memo_of_norms,
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
from rankscope.metrics.samples import alignment, alpha_req, distance_floor, lidar, rankme, rankme_floor, uniformity
from rankscope.metrics.spectrum import (
    affine_rank,
    affine_rank_with_doubt,
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

__all__ = [
    "FARTHEST", "FEW", "METRICS", "Meaning", "Metric", "MetricsLike", "NORMS", "Of", "PatternRows", "ROUNDING",
    "Reading", "Readings", "RowStatistics", "SMALLEST", "Tokens", "UNIT", "Values", "affine_rank",
    "affine_rank_with_doubt", "alignment", "alpha_req", "centred", "chosen_metrics", "composite_norm", "cosines",
    "defect_of_rows", "direction_of", "distance_floor", "dobrushin", "effective_keys", "effective_rank", "entropy",
    "entropy_of_rows", "expert_entropy", "expert_load", "first_token_mass", "first_token_of_rows", "frobenius_norm",
    "from_norms", "from_statistics", "high_frequency_share", "is_share", "largest_logit", "largest_square_distance",
    "largest_sum_distance", "lidar", "max_cosine_gap", "max_residual", "mean_abs_cosine", "mean_cosine",
    "mean_cosine_gap", "memo_of_norms", "metric", "min_cosine", "mu", "numerical_rank", "participation_ratio", "rankme",
    "rankme_floor", "relative_max_residual", "relative_mu", "relative_residual", "relative_spectral_residual",
    "residual", "residual_effective_rank", "residual_singular_ratio", "residual_stable_rank", "row_sum_defect",
    "second_singular_value", "sigma_min", "singular_values", "spectral_gap", "spectral_residual", "stable_rank",
    "symbol_of", "tokens", "tokens_of", "uniformity", "unit_of", "valid_tokens",
]  # fmt: skip

"""Paths: a network as the exact sum of one term per way through its heads."""

from rankscope.paths.by_part import LayerShares, TwoPasses, centred_tokens, uniform
from rankscope.paths.counts import (
    Path,
    Ways,
    all_paths,
    counts_along,
    length_of,
    path_counts,
    path_shares,
    paths_along,
    sampled_paths,
)
from rankscope.paths.decomposition import Decomposition, PathTerm, decompose
from rankscope.paths.figures import (
    LABELLED,
    carried,
    heads_chart,
    heads_section,
    heads_table,
    length_views,
    lengths_chart,
    lengths_section,
    single_paths_chart,
)
from rankscope.paths.frozen import FreezingRules, Frozen, FrozenLayer, FrozenNorm, freeze, frozen_pass, require_linear
from rankscope.paths.heaviest import Heaviest
from rankscope.paths.lengths import ByLength, by_length, rate, share
from rankscope.paths.polynomials import length_terms
from rankscope.paths.positions import ByPosition
from rankscope.paths.terms import OwnAttention, PathRules, PathStep, WholeNetwork, path_terms

__all__ = [
    "ByLength", "ByPosition", "Decomposition", "FreezingRules", "Frozen", "FrozenLayer", "FrozenNorm", "Heaviest",
    "LABELLED", "LayerShares", "OwnAttention", "Path", "PathRules", "PathStep", "PathTerm", "TwoPasses", "Ways",
    "WholeNetwork", "all_paths", "by_length", "carried", "centred_tokens", "counts_along", "decompose", "freeze",
    "frozen_pass", "heads_chart", "heads_section", "heads_table", "length_of", "length_terms", "length_views",
    "lengths_chart", "lengths_section", "path_counts", "path_shares", "path_terms", "paths_along", "rate",
    "require_linear", "sampled_paths", "share", "single_paths_chart", "uniform",
]  # fmt: skip

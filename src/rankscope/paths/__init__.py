"""Paths: a network as the exact sum of one term per way through its heads."""

from rankscope.paths.by_part import LayerShares, TwoPasses
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
from rankscope.paths.figures import carried
from rankscope.paths.frozen import Frozen, FrozenLayer, FrozenNorm, freeze, frozen_pass, require_linear
from rankscope.paths.heaviest import Heaviest
from rankscope.paths.lengths import ByLength, by_length, rate
from rankscope.paths.polynomials import length_terms
from rankscope.paths.positions import ByPosition
from rankscope.paths.terms import OwnAttention, PathRules, PathStep, path_terms

__all__ = [
    "ByLength", "ByPosition", "Decomposition", "Frozen", "FrozenLayer", "FrozenNorm", "Heaviest", "LayerShares",
    "OwnAttention", "Path", "PathRules", "PathStep", "PathTerm", "TwoPasses", "Ways", "all_paths", "by_length",
    "carried", "counts_along", "decompose", "freeze", "frozen_pass", "length_of", "length_terms", "path_counts",
    "path_shares", "path_terms", "paths_along", "rate", "require_linear", "sampled_paths",
]  # fmt: skip

"""Paths: a network as the exact sum of one term per way through its heads."""

from rankscope.paths.collapse import rate
from rankscope.paths.counts import Path, all_paths, length_of, path_counts, path_shares
from rankscope.paths.decompose import Decomposition, PathTerm, decompose
from rankscope.paths.heaviest import Heaviest
from rankscope.paths.lengths import ByLength
from rankscope.paths.positions import ByPosition

__all__ = [
    "ByLength", "ByPosition", "Decomposition", "Heaviest", "Path", "PathTerm", "all_paths", "decompose", "length_of",
    "path_counts", "path_shares", "rate",
]  # fmt: skip

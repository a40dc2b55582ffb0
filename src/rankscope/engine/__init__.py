"""The same work on one core, on many, or on a Ray cluster, to the same bits: `sweep`."""

from rankscope.engine.cell_selection import choice_in, profile_of
from rankscope.engine.cluster import Cluster, cluster
from rankscope.engine.spec import Spec, read_spec, spec_of
from rankscope.engine.sweep import Sweep, sweep

__all__ = [
    "Cluster", "Spec", "Sweep", "choice_in", "cluster", "profile_of", "read_spec", "spec_of", "sweep",
]  # fmt: skip

"""The same work on one core, on many, or on a Ray cluster, to the same bits: `sweep`, and `Cluster` for other work."""

from rankscope.engine.cluster import STUCK_AFTER, Cluster
from rankscope.engine.sections import Sweep
from rankscope.engine.shared_inputs import measure_on_cluster
from rankscope.engine.spec import CellJob, Spec, read_spec, spec_of
from rankscope.engine.sweeping import ResourceOptions, sweep
from rankscope.engine.views import choice_in, profile_of

__all__ = [
    "CellJob", "Cluster", "ResourceOptions", "STUCK_AFTER", "Spec", "Sweep", "choice_in", "measure_on_cluster",
    "profile_of", "read_spec", "spec_of", "sweep",
]  # fmt: skip

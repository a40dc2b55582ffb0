"""Live models, measured as they run: hooks read each layer and keep only the numbers."""

from rankscope.live.attention import OBSERVERS, AttentionCall, AttentionObserver
from rankscope.live.attention.row_statistics import row_statistics
from rankscope.live.attention.scores import AttentionScores
from rankscope.live.monitor import Monitor, default_rules
from rankscope.live.monitor.block_jacobians import leading_vectors
from rankscope.live.watch import Watch, watch

__all__ = [
    "AttentionCall", "AttentionObserver", "AttentionScores", "Monitor", "OBSERVERS", "Watch", "default_rules",
    "leading_vectors", "row_statistics", "watch",
]  # fmt: skip

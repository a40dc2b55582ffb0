"""Live models, measured as they run: hooks read each layer and keep only the numbers."""

from rankscope.live.attention import OBSERVERS, AttentionCall, AttentionObserver
from rankscope.live.attention.row_statistics import row_statistics
from rankscope.live.attention.scores import AttentionScores
from rankscope.live.watching import Watch, watch

__all__ = [
    "AttentionCall", "AttentionObserver", "AttentionScores", "OBSERVERS", "Watch",
    "row_statistics", "watch",
]  # fmt: skip

"""Live models, measured as they run: hooks read each layer and keep only the numbers."""

from rankscope.live.attention import OBSERVERS, AttentionCall, AttentionObserver
from rankscope.live.monitor import Monitor
from rankscope.live.watch import Watch, watch

__all__ = ["OBSERVERS", "AttentionCall", "AttentionObserver", "Monitor", "Watch", "watch"]

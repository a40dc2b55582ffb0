"""A training run, watched as it happens."""

from rankscope.live.monitor.looks import Alarm, Look
from rankscope.live.monitor.monitor import Monitor

__all__ = ["Alarm", "Look", "Monitor"]

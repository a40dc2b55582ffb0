"""A training run, watched as it happens."""

from rankscope.live.monitor.alarms import Hears, Rule
from rankscope.live.monitor.looks import Alarm, Look
from rankscope.live.monitor.monitor import Monitor
from rankscope.live.monitor.rules import default_rules

__all__ = ["Alarm", "Hears", "Look", "Monitor", "Rule", "default_rules"]

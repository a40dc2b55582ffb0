"""Measuring networks layer by layer, and what comes of it."""

from rankscope.profiles.measure import ARITHMETICS, DEFAULT_METRICS, measure
from rankscope.profiles.profile import Profile

__all__ = ["ARITHMETICS", "DEFAULT_METRICS", "Profile", "measure"]

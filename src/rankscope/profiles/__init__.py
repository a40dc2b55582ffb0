"""Measuring networks layer by layer, and what comes of it."""

from rankscope.profiles.corpus import measure_corpus
from rankscope.profiles.gather import Gatherer
from rankscope.profiles.measure import ARITHMETICS, DEFAULT_METRICS, measure
from rankscope.profiles.profile import Profile
from rankscope.profiles.summary import Summary

__all__ = ["ARITHMETICS", "DEFAULT_METRICS", "Gatherer", "Profile", "Summary", "measure", "measure_corpus"]

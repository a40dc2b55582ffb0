"""Measuring networks layer by layer, and what comes of it."""

from rankscope.profiles.corpus import measure_corpus
from rankscope.profiles.gathered import Gathered
from rankscope.profiles.measure import ARITHMETICS, DEFAULT_METRICS, measure
from rankscope.profiles.profile import Profile
from rankscope.profiles.summary import Summary

__all__ = ["ARITHMETICS", "DEFAULT_METRICS", "Gathered", "Profile", "Summary", "measure", "measure_corpus"]

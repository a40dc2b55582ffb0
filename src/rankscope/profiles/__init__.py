"""Measuring networks layer by layer, and what comes of it."""

from rankscope.profiles.corpus import measure_corpus
from rankscope.profiles.gather import Gatherer
from rankscope.profiles.measure import DEFAULT_METRICS, measure
from rankscope.profiles.profile import Profile
from rankscope.profiles.propagation import ARITHMETICS, one_pass
from rankscope.profiles.readers import Reader
from rankscope.profiles.summary import Summary

__all__ = [
    "ARITHMETICS",
    "DEFAULT_METRICS",
    "Gatherer",
    "Profile",
    "Reader",
    "Summary",
    "measure",
    "measure_corpus",
    "one_pass",
]

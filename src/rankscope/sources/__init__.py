"""Where networks and tokens come from."""

from rankscope.sources.families import FAMILIES, Family
from rankscope.sources.fresh import fresh, untrained
from rankscope.sources.load import load
from rankscope.sources.named import named_network
from rankscope.sources.presets import PRESETS, preset
from rankscope.sources.texts import Excerpts, excerpts
from rankscope.sources.words import bundled_excerpts, word_tokens

__all__ = [
    "FAMILIES",
    "PRESETS",
    "Excerpts",
    "Family",
    "bundled_excerpts",
    "excerpts",
    "fresh",
    "load",
    "named_network",
    "preset",
    "untrained",
    "word_tokens",
]

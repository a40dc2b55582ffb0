"""Networks and tokens: `load` a model, `fresh` random weights, excerpts of text, images."""

from rankscope.shipped import held_out_images
from rankscope.sources.families import FAMILIES, Family
from rankscope.sources.fresh import PRESETS, fresh, preset, untrained
from rankscope.sources.load import load, named_network
from rankscope.sources.random_embedding import bundled_excerpts, word_tokens
from rankscope.sources.texts import Excerpts, excerpts

__all__ = [
    "FAMILIES",
    "PRESETS",
    "Excerpts",
    "Family",
    "bundled_excerpts",
    "excerpts",
    "fresh",
    "held_out_images",
    "load",
    "named_network",
    "preset",
    "untrained",
    "word_tokens",
]

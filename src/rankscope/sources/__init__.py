"""Networks and tokens: `load` a model, `fresh` random weights, excerpts of text, images."""

from rankscope.shipped import held_out_images
from rankscope.sources.checkpoint import MINILM, first_line
from rankscope.sources.families import FAMILIES, Family
from rankscope.sources.fresh import PRESETS, bundled_excerpts, fresh, preset, split, untrained, word_tokens
from rankscope.sources.inputs import InputsLike, NetworkLike, inputs_of
from rankscope.sources.load import is_drawn, load, named_network
from rankscope.sources.texts import Excerpts, excerpts

__all__ = [
    "Excerpts", "FAMILIES", "Family", "InputsLike", "MINILM", "NetworkLike", "PRESETS", "bundled_excerpts", "excerpts",
    "first_line", "fresh", "held_out_images", "inputs_of", "is_drawn", "load", "named_network", "preset", "split",
    "untrained", "word_tokens",
]  # fmt: skip

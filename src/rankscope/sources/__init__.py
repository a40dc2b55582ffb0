"""Networks and tokens: `load` a model, `fresh` random weights, excerpts of text, images."""

from rankscope.shipped import held_out_images
from rankscope.sources.checkpoint import MINILM, CheckpointLocation, first_line, locate
from rankscope.sources.families import FAMILIES, Family
from rankscope.sources.inputs import InputsLike, NetworkLike, inputs_of, network_on_batch
from rankscope.sources.loading import FamilyParity, is_drawn, load, named_network, survey
from rankscope.sources.parity import is_transformers_own, lifted
from rankscope.sources.presets import PRESETS, bundled_excerpts, fresh, preset, split, untrained, word_tokens
from rankscope.sources.texts import Excerpts, excerpts

__all__ = [
    "CheckpointLocation", "Excerpts", "FAMILIES", "Family", "FamilyParity", "InputsLike", "MINILM", "NetworkLike",
    "PRESETS", "bundled_excerpts", "excerpts", "first_line", "fresh", "held_out_images", "inputs_of", "is_drawn",
    "is_transformers_own", "lifted", "load", "locate", "named_network", "network_on_batch", "preset", "split", "survey",
    "untrained", "word_tokens",
]  # fmt: skip

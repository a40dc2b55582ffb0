"""Networks and tokens: `load` a model, `fresh` random weights, excerpts of text, images."""

from rankscope.shipped import held_out_images
from rankscope.sources.checkpoint import MINILM, CheckpointLocation, HubOptions, first_line, locate, tokenizer
from rankscope.sources.families import FAMILIES, Family
from rankscope.sources.inputs import InputsLike, NetworkLike, inputs_of, network_on_batch
from rankscope.sources.loading import FamilyParity, is_drawn, load, named_network, survey
from rankscope.sources.parity import is_transformers_own, lifted
from rankscope.sources.presets import PRESETS, bundled_excerpts, fresh, preset, split, word_tokens
from rankscope.sources.shortened import MODULES, original, write_shortened
from rankscope.sources.texts import LONGEST, Excerpts, excerpts
from rankscope.sources.weight_files import ENDINGS, training_step, write_folder

__all__ = [
    "CheckpointLocation", "ENDINGS", "Excerpts", "FAMILIES", "Family", "FamilyParity", "HubOptions", "InputsLike",
    "LONGEST", "MINILM", "MODULES", "NetworkLike", "PRESETS", "bundled_excerpts", "excerpts", "first_line", "fresh",
    "held_out_images", "inputs_of", "is_drawn", "is_transformers_own", "lifted", "load", "locate", "named_network",
    "network_on_batch", "original", "preset", "split", "survey", "tokenizer", "training_step",
    "word_tokens", "write_folder", "write_shortened",
]  # fmt: skip

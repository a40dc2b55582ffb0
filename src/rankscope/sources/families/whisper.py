"""Whisper, whose blocks are laid out as BART's."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.embedding import Embedding, SoundEmbedding
from rankscope.sources.families.bart import Bart, BartDecoder
from rankscope.sources.families.family import architecture_from, convolution


class Whisper(Bart):
    """Whisper's encoder of mel spectra."""

    name, types = "whisper", ("whisper",)
    continuous_inputs, input_name, final_norm = True, "input_features", "layer_norm"

    def architecture(self, config: Any) -> Architecture:
        """Pre-norm with a last norm, torch's usual eps."""
        return architecture_from(config, **self.sizes(config), norm_place="pre", norm_eps=1e-5, final_norm=True)

    def embedding(self, model: Any) -> Embedding:
        """Two convolutions of a mel spectrum, and positions."""
        positions = model.embed_positions.weight.detach()
        return SoundEmbedding(convolution(model.conv1), convolution(model.conv2), positions)


class WhisperDecoder(Whisper):
    """Whisper's decoder: causal, with cross-attention."""

    name, side, inside = "whisper_decoder", "decoder", "decoder"
    continuous_inputs = False
    parts = BartDecoder.parts
    embedding_parts: ClassVar = {"words": "embed_tokens", "positions": "embed_positions"}

    def embedding(self, model: Any) -> Embedding:
        """The sum of words and positions."""
        return self.text(model)

    def first_position(self, model: Any) -> int:
        """Positions start at row 0 of the table."""
        return 0

"""Marian, whose blocks are laid out as BART's."""

from typing import Any, ClassVar

from rankscope.sources.embedding import Embedding
from rankscope.sources.families.bart import Bart, BartDecoder


class Marian(Bart):
    """Marian's encoder: post-norm, sinusoidal positions."""

    name, types = "marian", ("marian",)
    computed = ("embed_positions.weight",)
    embedding_parts: ClassVar = {"words": "embed_tokens", "positions": "embed_positions"}

    def embedding(self, model: Any) -> Embedding:
        """Words may be scaled; positions count padding too."""
        return self.text(model, scale=model.embed_scale, by_column=True)

    def first_position(self, model: Any) -> int:
        """Positions start at row 0 of the table."""
        return 0


class MarianDecoder(Marian):
    """Marian's decoder: causal, with cross-attention."""

    name, side, inside = "marian_decoder", "decoder", "decoder"
    parts = BartDecoder.parts

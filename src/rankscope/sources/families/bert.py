"""BERT: post-norm, words + positions + segment through a norm."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.families.family import Family, architecture_from, layout, require


class Bert(Family):
    """BERT, as an encoder or as a decoder."""

    name = "bert"
    types: ClassVar[tuple[str, ...]] = ("bert",)
    stack = "encoder.layer"
    parts: ClassVar = layout(
        "attention", "self.query self.key self.value output.dense",
        norms="attention.output.LayerNorm output.LayerNorm", mlp="intermediate.dense output.dense",
    )  # fmt: skip
    embedding_parts: ClassVar = {
        "words": "embeddings.word_embeddings",
        "positions": "embeddings.position_embeddings",
        "segment": "embeddings.token_type_embeddings",
        "norm": "embeddings.LayerNorm",
    }

    def architecture(self, config: Any) -> Architecture:
        """Post-norm; causal where the config says decoder."""
        require(config, add_cross_attention=False)
        mask = "causal" if config.is_decoder else "complete"
        return architecture_from(config, norm_eps=config.layer_norm_eps, mask=mask)

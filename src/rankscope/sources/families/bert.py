"""BERT: post-norm, words + positions + segment through a norm."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.families.family import SMALL_TEXT, Family, Places, described, refuse


class Bert(Family):
    """BERT, as an encoder or as a decoder."""

    name = "bert"
    types: ClassVar[tuple[str, ...]] = ("bert",)
    stack = "encoder.layer"
    parts: ClassVar[Places] = {
        "attention.query": "attention.self.query",
        "attention.key": "attention.self.key",
        "attention.value": "attention.self.value",
        "attention.output": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "mlp.up": "intermediate.dense",
        "mlp.down": "output.dense",
        "mlp_norm": "output.LayerNorm",
    }
    embedded: ClassVar[Places] = {
        "words": "embeddings.word_embeddings",
        "positions": "embeddings.position_embeddings",
        "segment": "embeddings.token_type_embeddings",
        "norm": "embeddings.LayerNorm",
    }

    def architecture(self, config: Any) -> Architecture:
        """Post-norm."""
        refuse(config, add_cross_attention=False)
        mask = "causal" if config.is_decoder else "complete"
        return described(config, norm_eps=config.layer_norm_eps, mask=mask)

    def tiny(self) -> dict[str, Any]:
        """An encoder and a decoder."""
        from transformers import BertConfig

        return {
            "encoder": BertConfig(**SMALL_TEXT, intermediate_size=24),
            "decoder": BertConfig(**SMALL_TEXT, intermediate_size=24, is_decoder=True),
        }

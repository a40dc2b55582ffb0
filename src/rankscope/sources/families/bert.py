"""BERT: post-norm, words + positions + segment through a norm."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.embedding import TextEmbedding
from rankscope.sources.families.family import (
    Family,
    Tensors,
    activation,
    dense,
    heads_in,
    heads_out,
    norm,
    norm_weights,
    refuse,
)


class Bert(Family):
    """BERT, as an encoder or as a decoder."""

    name = "bert"
    types: ClassVar[tuple[str, ...]] = ("bert",)

    def architecture(self, config: Any) -> Architecture:
        """Post-norm."""
        refuse(config, add_cross_attention=False)
        return Architecture(
            layers=config.num_hidden_layers, width=config.hidden_size, heads=config.num_attention_heads,
            mlp_width=config.intermediate_size, activation=activation(config.hidden_act),
            norm_eps=config.layer_norm_eps, mask="causal" if config.is_decoder else "complete",
        )  # fmt: skip

    def blocks(self, model: Any) -> list[Any]:
        """The encoder's layers."""
        return list(model.encoder.layer)

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """Query, key and value apart."""
        attention = block.attention
        return {
            **heads_in("query", attention.self.query, arch.heads),
            **heads_in("key", attention.self.key, arch.heads),
            **heads_in("value", attention.self.value, arch.heads),
            **heads_out(attention.output.dense, arch.heads),
            **norm("attention_norm", attention.output.LayerNorm),
            **dense("mlp.up", block.intermediate.dense),
            **dense("mlp.down", block.output.dense),
            **norm("mlp_norm", block.output.LayerNorm),
        }

    def embedding(self, model: Any) -> TextEmbedding:
        """Segment 0."""
        parts = model.embeddings
        return TextEmbedding(
            words=parts.word_embeddings.weight.detach(),
            positions=parts.position_embeddings.weight.detach()[self.first_position(model) :],
            segment=parts.token_type_embeddings.weight.detach()[0],
            norm=norm_weights(parts.LayerNorm),
            norm_eps=parts.LayerNorm.eps,
        )

    def first_position(self, model: Any) -> int:
        """The row of the position table that the first token has."""
        return 0

    def tiny(self) -> dict[str, Any]:
        """An encoder and a decoder."""
        from transformers import BertConfig

        small: dict[str, Any] = {
            "vocab_size": 60,
            "hidden_size": 16,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 24,
            "max_position_embeddings": 32,
        }
        return {"encoder": BertConfig(**small), "decoder": BertConfig(**small, is_decoder=True)}

"""ALBERT: one layer applied again and again, a narrow embedding widened before it."""

from typing import Any

from rankscope.nets import Architecture
from rankscope.sources.embedding import TextEmbedding
from rankscope.sources.families.family import (
    Family,
    Tensors,
    activation,
    dense,
    heads_in,
    heads_out,
    linear_weights,
    norm,
    norm_weights,
)


class Albert(Family):
    """ALBERT; with several groups, each repeats its own layers."""

    name = "albert"
    types = ("albert",)

    def architecture(self, config: Any) -> Architecture:
        """Post-norm; shared where there is but one layer to share."""
        return Architecture(
            layers=config.num_hidden_layers * config.inner_group_num, width=config.hidden_size,
            heads=config.num_attention_heads, mlp_width=config.intermediate_size,
            activation=activation(config.hidden_act), norm_eps=config.layer_norm_eps,
            shared=config.num_hidden_groups == config.inner_group_num == 1,
        )  # fmt: skip

    def blocks(self, model: Any) -> list[Any]:
        """Group by group, as `AlbertTransformer` applies them."""
        config, groups = model.config, model.encoder.albert_layer_groups
        per_group = config.num_hidden_layers / config.num_hidden_groups
        return [
            block
            for index in range(config.num_hidden_layers)
            for block in groups[int(index / per_group)].albert_layers
        ]

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """Query, key and value apart."""
        attention = block.attention
        return {
            **heads_in("query", attention.query, arch.heads),
            **heads_in("key", attention.key, arch.heads),
            **heads_in("value", attention.value, arch.heads),
            **heads_out(attention.dense, arch.heads),
            **norm("attention_norm", attention.LayerNorm),
            **dense("mlp.up", block.ffn),
            **dense("mlp.down", block.ffn_output),
            **norm("mlp_norm", block.full_layer_layer_norm),
        }

    def embedding(self, model: Any) -> TextEmbedding:
        """Normed narrow, then widened."""
        parts = model.embeddings
        return TextEmbedding(
            words=parts.word_embeddings.weight.detach(),
            positions=parts.position_embeddings.weight.detach(),
            segment=parts.token_type_embeddings.weight.detach()[0],
            norm=norm_weights(parts.LayerNorm),
            norm_eps=parts.LayerNorm.eps,
            after=linear_weights(model.encoder.embedding_hidden_mapping_in),
        )

    def tiny(self) -> dict[str, Any]:
        """All layers shared, and two groups of two."""
        from transformers import AlbertConfig

        small: dict[str, Any] = {
            "vocab_size": 60,
            "embedding_size": 8,
            "hidden_size": 16,
            "num_attention_heads": 4,
            "num_hidden_layers": 4,
            "intermediate_size": 24,
            "max_position_embeddings": 32,
        }
        return {
            "shared": AlbertConfig(**small),
            "groups": AlbertConfig(**small, num_hidden_groups=2, inner_group_num=2),
        }

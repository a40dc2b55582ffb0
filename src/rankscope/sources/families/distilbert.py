"""DistilBERT: BERT's block under other names, no segment."""

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
    norm,
    norm_weights,
)


class DistilBert(Family):
    """DistilBERT."""

    name = "distilbert"
    types = ("distilbert",)

    def architecture(self, config: Any) -> Architecture:
        """Post-norm; its eps is fixed."""
        return Architecture(
            layers=config.n_layers, width=config.dim, heads=config.n_heads, mlp_width=config.hidden_dim,
            activation=activation(config.activation), norm_eps=1e-12,
        )  # fmt: skip

    def blocks(self, model: Any) -> list[Any]:
        """The transformer's layers."""
        return list(model.transformer.layer)

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """Query, key and value apart."""
        return {
            **heads_in("query", block.attention.q_lin, arch.heads),
            **heads_in("key", block.attention.k_lin, arch.heads),
            **heads_in("value", block.attention.v_lin, arch.heads),
            **heads_out(block.attention.out_lin, arch.heads),
            **norm("attention_norm", block.sa_layer_norm),
            **dense("mlp.up", block.ffn.lin1),
            **dense("mlp.down", block.ffn.lin2),
            **norm("mlp_norm", block.output_layer_norm),
        }

    def embedding(self, model: Any) -> TextEmbedding:
        """Words and positions."""
        parts = model.embeddings
        return TextEmbedding(
            words=parts.word_embeddings.weight.detach(),
            positions=parts.position_embeddings.weight.detach(),
            norm=norm_weights(parts.LayerNorm),
            norm_eps=parts.LayerNorm.eps,
        )

    def tiny(self) -> dict[str, Any]:
        """An encoder."""
        from transformers import DistilBertConfig

        return {
            "encoder": DistilBertConfig(
                vocab_size=60, dim=16, n_layers=3, n_heads=4, hidden_dim=24, max_position_embeddings=32
            )
        }

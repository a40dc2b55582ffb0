"""XLNet: relative positions after Transformer-XL; its blocks take [token, batch, width]."""

from typing import Any

from rankscope.nets import Architecture
from rankscope.sources.embedding import TextEmbedding
from rankscope.sources.families.family import Family, Tensors, activation, dense, norm, refuse


class XLNet(Family):
    """XLNet reading a whole sequence: one stream, no memory, no segments."""

    name = "xlnet"
    types = ("xlnet",)
    tokens_first = True

    def architecture(self, config: Any) -> Architecture:
        """Post-norm."""
        refuse(config, attn_type="bi", bi_data=False, clamp_len=-1, same_length=False)
        return Architecture(
            layers=config.n_layer, width=config.d_model, heads=config.n_head, head_width=config.d_head,
            mlp_width=config.d_inner, activation=activation(config.ff_activation),
            norm_eps=config.layer_norm_eps, positions="relative",
        )  # fmt: skip

    def blocks(self, model: Any) -> list[Any]:
        """The layers."""
        return list(model.layer)

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """Projections are kept by head already; r projects positions, r_w and r_r are u and v."""
        attention = block.rel_attn
        return {
            "attention.query.weight": attention.q,
            "attention.key.weight": attention.k,
            "attention.value.weight": attention.v,
            "attention.output.weight": attention.o.permute(1, 2, 0),
            "attention.position": attention.r,
            "attention.content_bias": attention.r_w_bias,
            "attention.position_bias": attention.r_r_bias,
            **norm("attention_norm", attention.layer_norm),
            **dense("mlp.up", block.ff.layer_1),
            **dense("mlp.down", block.ff.layer_2),
            **norm("mlp_norm", block.ff.layer_norm),
        }

    def embedding(self, model: Any) -> TextEmbedding:
        """Words alone."""
        return TextEmbedding(words=model.word_embedding.weight.detach())

    def tiny(self) -> dict[str, Any]:
        """An encoder."""
        from transformers import XLNetConfig

        return {
            "encoder": XLNetConfig(
                vocab_size=60, d_model=16, n_layer=3, n_head=4, d_inner=24, ff_activation="gelu", dropout=0.0
            )
        }

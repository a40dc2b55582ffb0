"""XLNet: relative positions after Transformer-XL; its blocks take [token, batch, width]."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.families.family import Family, Tensors, architecture_from, require


class XLNet(Family):
    """XLNet reading a whole sequence: one stream, no memory, no segments."""

    name, types = "xlnet", ("xlnet",)
    tokens_first = True
    stack = "layer"
    parts: ClassVar = {
        "attention_norm": "rel_attn.layer_norm",
        "mlp.up": "ff.layer_1",
        "mlp.down": "ff.layer_2",
        "mlp_norm": "ff.layer_norm",
    }
    embedding_parts: ClassVar = {"words": "word_embedding"}

    def architecture(self, config: Any) -> Architecture:
        """A post-norm encoder with relative positions."""
        require(config, attn_type="bi", bi_data=False, clamp_len=-1, same_length=False)
        return architecture_from(
            config, head_width=config.d_head, mlp_width=config.d_inner, positions="relative",
            activation=config.ff_activation, norm_eps=config.layer_norm_eps,
        )  # fmt: skip

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """Projections are kept by head already; r projects positions, r_w and r_r are u and v."""
        attention = block.rel_attn
        return {
            **super().layer(block, arch),
            "attention.query.weight": attention.q,
            "attention.key.weight": attention.k,
            "attention.value.weight": attention.v,
            "attention.output.weight": attention.o.permute(1, 2, 0),
            "attention.position": attention.r,
            "attention.content_bias": attention.r_w_bias,
            "attention.position_bias": attention.r_r_bias,
        }

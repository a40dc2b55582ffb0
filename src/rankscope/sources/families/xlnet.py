"""XLNet: relative positions after Transformer-XL; its blocks take [token, batch, width]."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.families.family import Family
from rankscope.sources.families.parts import Tensors


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
    fixed: ClassVar = {"positions": "relative"}
    reads: ClassVar = {"head_width": "d_head", "mlp_width": "d_inner", "activation": "ff_activation"}
    only: ClassVar = {"attn_type": "bi", "bi_data": False, "clamp_len": -1, "same_length": False}

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

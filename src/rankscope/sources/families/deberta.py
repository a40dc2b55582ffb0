"""DeBERTa, the first: v2's scores, with queries, keys and values side by side in one matrix."""

from typing import Any, ClassVar

import torch

from rankscope.nets import Architecture, Linear
from rankscope.sources.families.bert import Bert
from rankscope.sources.families.deberta_v2 import DebertaV2
from rankscope.sources.families.family import Tensors, heads_in, read_block, require


class Deberta(DebertaV2):
    """DeBERTa (v1), whose queries and values have biases beside their matrix, and keys none."""

    name, types = "deberta", ("deberta",)
    parts: ClassVar = {
        name: path for name, path in Bert.parts.items() if name.split(".")[-1] not in ("query", "key", "value")
    }

    def architecture(self, config: Any) -> Architecture:
        """As v2's; every distance has a row of the table."""
        require(config, talking_head=False)
        return super().architecture(config)

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """Fused by head: [head, (query, key, value), head_width]."""
        tensors, attention = read_block(block, self.parts, arch), block.attention.self
        by_head = attention.in_proj.weight.unflatten(0, (arch.heads, 3, arch.head_width))
        for name, part in zip(("query", "key", "value"), by_head.unbind(1), strict=True):
            tensors[f"attention.{name}.weight"] = part.permute(2, 0, 1)
        for name, bias in (("query", attention.q_bias), ("value", attention.v_bias)):
            tensors[f"attention.{name}.bias"] = bias.reshape(arch.heads, -1)
        if arch.positions == "disentangled":
            width = attention.in_proj.in_features
            none = Linear(attention.q_bias.new_zeros(width, width))
            keys = attention.pos_proj if "c2p" in attention.pos_att_type else none
            queries = attention.pos_q_proj if "p2c" in attention.pos_att_type else none
            tensors |= heads_in("attention.relative_key", keys, arch.heads)
            tensors |= heads_in("attention.relative_query", queries, arch.heads)
            tensors.setdefault("attention.relative_query.bias", torch.zeros_like(tensors["attention.query.bias"]))
        return tensors

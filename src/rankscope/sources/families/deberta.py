"""DeBERTa: BERT's blocks, whose scores add products of queries and of keys with relative positions."""

from importlib import import_module
from typing import Any, ClassVar

import torch

from rankscope.nets import Architecture, Linear
from rankscope.sources.families.bert import Bert
from rankscope.sources.families.family import Family, refuse_others
from rankscope.sources.families.parts import Tensors, heads_in, projections, without


class DebertaV2(Family):
    """DeBERTa v2 without its convolution, and v3."""

    name, types, stack = "deberta_v2", ("deberta-v2",), Bert.stack
    parts: ClassVar = {
        **Bert.parts,
        **projections("attention", "self.query_proj self.key_proj self.value_proj output.dense"),
    }
    embedding_parts = Bert.embedding_parts
    only: ClassVar = {"conv_kernel_size": 0}

    def architecture(self, config: Any) -> Architecture:
        """Post-norm, with the divisor of its own code."""
        refuse_others(config, **self.only, embedding_size=config.hidden_size)
        width = getattr(config, "attention_head_size", config.hidden_size // config.num_attention_heads)
        terms = 1 + len({"c2p", "p2c"} & {*(config.pos_att_type or ())})
        fields: dict[str, Any] = {"head_width": width, "divisor": self.divisor(width, terms)}
        if config.relative_attention:
            reach = config.max_relative_positions
            reach = config.max_position_embeddings if reach < 1 else reach
            buckets = getattr(config, "position_buckets", -1)
            sizes = (buckets, reach) if buckets > 0 else (reach, 1)
            fields |= {"positions": "disentangled", "bias_buckets": sizes[0], "bias_reach": sizes[1]}
        return self.described(config, **fields)

    def divisor(self, width: int, terms: int) -> float:
        """What scores are divided by. transformers 5.22 compiles the function for it, which is float32 whatever the
        dtype; that of 5.23 can be lifted to float64 (`parity.py`)."""
        code = import_module(f"transformers.models.{self.name}.modeling_{self.name}")
        compiled = isinstance(code.scaled_size_sqrt, torch.jit.ScriptFunction)
        size = torch.tensor(float(width * terms), dtype=torch.float32 if compiled else torch.float64)
        return float(size.sqrt())

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """Positions are projected by maps of their own, or by those of queries and keys; a term that is not there
        is zero."""
        tensors, attention = super().layer(block, arch), block.attention.self
        if arch.positions != "disentangled":
            return tensors
        for name, term in (("query", "p2c"), ("key", "c2p")):
            linear = getattr(attention, f"{name}_proj" if attention.share_att_key else f"pos_{name}_proj", None)
            present = term in attention.pos_att_type
            part = heads_in(f"attention.relative_{name}", linear if present else attention.query_proj, arch.heads)
            tensors |= part if present else {key: torch.zeros_like(tensor) for key, tensor in part.items()}
        return tensors

    def other_tensors(self, model: Any) -> Tensors:
        """The table of relative positions, through its norm where it has one."""
        table = model.encoder.get_rel_embedding()
        return {} if table is None else {"relative_table": table}


class Deberta(DebertaV2):
    """DeBERTa (v1), whose queries and values have biases beside their matrix, and keys none."""

    name, types = "deberta", ("deberta",)
    parts: ClassVar = {
        **without(Bert.parts, "attention.query", "attention.key", "attention.value"),
        **projections("attention", "self.in_proj output.dense", joined=" | "),
    }
    only: ClassVar = {"talking_head": False, **DebertaV2.only}

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """Positions are projected by maps of their own; a term that is not there is zero."""
        tensors, attention = super(DebertaV2, self).layer(block, arch), block.attention.self
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

"""DeBERTa v2 and v3: BERT's blocks, whose scores add products of queries and of keys with relative positions."""

from importlib import import_module
from typing import Any, ClassVar

import torch

from rankscope.nets import Architecture
from rankscope.sources.embedding import TextEmbedding
from rankscope.sources.families.bert import Bert
from rankscope.sources.families.family import Tensors, architecture_from, heads_in, projections, require

PROJECTIONS = projections("attention", "self.query_proj self.key_proj self.value_proj output.dense")


class DebertaV2(Bert):
    """DeBERTa v2 without its convolution, and v3."""

    name, types = "deberta_v2", ("deberta-v2",)
    parts: ClassVar = {**Bert.parts, **PROJECTIONS}
    embedding_parts: ClassVar = {"words": "embeddings.word_embeddings", "norm": "embeddings.LayerNorm"}

    def architecture(self, config: Any) -> Architecture:
        """Post-norm, with the divisor of its own code."""
        require(config, conv_kernel_size=0, embedding_size=config.hidden_size)
        width = getattr(config, "attention_head_size", config.hidden_size // config.num_attention_heads)
        terms = 1 + len({"c2p", "p2c"} & {*(config.pos_att_type or ())})
        fields: dict[str, Any] = {"head_width": width, "divisor": self.divisor(width, terms)}
        if config.relative_attention:
            reach = config.max_relative_positions
            reach = config.max_position_embeddings if reach < 1 else reach
            buckets = getattr(config, "position_buckets", -1)
            sizes = (buckets, reach) if buckets > 0 else (reach, 1)
            fields |= {"positions": "disentangled", "bias_buckets": sizes[0], "bias_reach": sizes[1]}
        return architecture_from(config, norm_eps=config.layer_norm_eps, **fields)

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

    def embedding(self, model: Any) -> TextEmbedding:
        """Words, and positions and segments where the model has them, through a norm."""
        parts, more = model.embeddings, dict[str, Any]()
        if parts.position_embeddings is not None:
            more["positions"] = parts.position_embeddings.weight.detach()
        if parts.token_type_embeddings is not None:
            more["segment"] = parts.token_type_embeddings.weight.detach()[0]
        return self.text(model, **more)

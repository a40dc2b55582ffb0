"""Nomic BERT: BERT's blocks with rotary positions and gated MLPs."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.families.bert import Bert
from rankscope.sources.families.family import architecture_from
from rankscope.sources.families.llama import Llama
from rankscope.sources.families.rotary import rotary


class NomicBert(Bert):
    """Nomic BERT (nomic-embed-text): post-norm, without biases outside of norms."""

    name, types, stack = "nomic_bert", ("nomic_bert",), "layers"
    parts: ClassVar = {**Llama.parts, "attention_norm": "post_attention_layernorm", "mlp_norm": "post_mlp_layernorm"}
    embedding_parts: ClassVar = {name: path for name, path in Bert.embedding_parts.items() if name != "positions"}

    def architecture(self, config: Any) -> Architecture:
        """Every token sees every other."""
        return architecture_from(
            config, head_width=config.head_dim, mlp="gated", norm_eps=config.layer_norm_eps, **rotary(config)
        )

"""ModernBERT: pre-norm, rotary positions, windows."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.families.family import Family, architecture_from
from rankscope.sources.families.rotary import masks, rotary


class ModernBert(Family):
    """ModernBERT. Wi is what the activation takes, then the other."""

    name, types = "modernbert", ("modernbert",)
    stack, final_norm = "layers", "final_norm"
    parts: ClassVar = {
        "attention.query, attention.key, attention.value": "attn.Wqkv",
        "attention.output": "attn.Wo",
        "attention_norm": "attn_norm",
        "mlp.gate, mlp.up": "mlp.Wi",
        "mlp.down": "mlp.Wo",
        "mlp_norm": "mlp_norm",
    }
    embedding_parts: ClassVar = {"words": "embeddings.tok_embeddings", "norm": "embeddings.norm"}

    def architecture(self, config: Any) -> Architecture:
        """The first attention reads the embedding, which is normed already."""
        return architecture_from(
            config, mask=masks(config, "complete"), **rotary(config), mlp="gated", norm_place="pre",
            activation=config.hidden_activation, norm_eps=config.norm_eps, final_norm=True,
            bare_layers=(0,),
        )  # fmt: skip

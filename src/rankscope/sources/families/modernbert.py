"""ModernBERT: pre-norm but for the first attention, rotary positions, gated MLP, windows in most layers."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.families.family import SMALL_TEXT, Family, activation, architecture_from
from rankscope.sources.families.rotary import masks, rotary

SIZES = SMALL_TEXT | {
    "num_hidden_layers": 4, "intermediate_size": 24, "local_attention": 6, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
}  # fmt: skip


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
    tiny_fields: ClassVar = {
        "no biases": ("ModernBertConfig", SIZES),
        "biases": ("ModernBertConfig", SIZES | dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias"), True)),
    }

    def architecture(self, config: Any) -> Architecture:
        """The first attention reads the embedding, which is normed already."""
        return architecture_from(
            config, mask=masks(config, "complete"), **rotary(config), mlp="gated", norm_place="pre",
            activation=activation(config.hidden_activation), norm_eps=config.norm_eps, final_norm=True,
            bare_layers=(0,),
        )  # fmt: skip

"""ModernBERT: pre-norm but for the first attention, rotary positions, gated MLP, windows in most layers."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.families.family import SMALL_TEXT, Family, ModulePaths, activation, architecture_from
from rankscope.sources.families.rotary import masks, rotary


class ModernBert(Family):
    """ModernBERT. Wi is what the activation takes, then the other."""

    name = "modernbert"
    types = ("modernbert",)
    stack, final_norm = "layers", "final_norm"
    parts: ClassVar[ModulePaths] = {
        "attention.query, attention.key, attention.value": "attn.Wqkv",
        "attention.output": "attn.Wo",
        "attention_norm": "attn_norm",
        "mlp.gate, mlp.up": "mlp.Wi",
        "mlp.down": "mlp.Wo",
        "mlp_norm": "mlp_norm",
    }
    embedding_parts: ClassVar[ModulePaths] = {"words": "embeddings.tok_embeddings", "norm": "embeddings.norm"}

    def architecture(self, config: Any) -> Architecture:
        """The first attention reads the embedding, which is normed already."""
        return architecture_from(
            config, mask=masks(config, "complete"), **rotary(config),
            mlp="gated", activation=activation(config.hidden_activation), norm_place="pre",
            norm_eps=config.norm_eps, final_norm=True, bare_layers=(0,),
        )  # fmt: skip

    def tiny_configs(self) -> dict[str, Any]:
        """A global layer, then two local ones; without biases and with all of them."""
        from transformers import ModernBertConfig

        tokens = {
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
        }
        sizes = {"num_hidden_layers": 4, "intermediate_size": 24, "local_attention": 6}
        small = SMALL_TEXT | sizes | tokens
        return {
            "no biases": ModernBertConfig(**small),
            "biases": ModernBertConfig(**small, attention_bias=True, mlp_bias=True, norm_bias=True),
        }

"""Llama and its kin: RMSNorm before, rotary positions, grouped heads, gated MLP."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.families.family import (
    SMALL_TEXT,
    Family,
    ModulePaths,
    Tensors,
    architecture_from,
    read_block,
)
from rankscope.sources.families.rotary import masks, rotary, sliding

NO_TOKENS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
"""Fields for `tiny_configs`, whose vocabulary is smaller than the usual ids."""
QUERY_NORMS = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}


class Llama(Family):
    """Llama, Mistral (windows), Qwen 2 (biases) and Qwen 3 (norms on queries and keys)."""

    name = "llama"
    types: ClassVar[tuple[str, ...]] = ("llama", "mistral", "qwen2", "qwen3")
    stack, final_norm = "layers", "norm"
    parts: ClassVar[ModulePaths] = {
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.o_proj",
        "attention_norm": "input_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
        "mlp_norm": "post_attention_layernorm",
    }
    embedding_parts: ClassVar[ModulePaths] = {"words": "embed_tokens"}

    def architecture(self, config: Any) -> Architecture:
        """Pre-norm with a last norm."""
        return self.gated(config, norm_place="pre", query_norm=config.model_type == "qwen3")

    def gated(self, config: Any, share: float = 1.0, **fields: Any) -> Architecture:
        """What all of them share; `share` of a head is rotated."""
        return architecture_from(
            config, key_heads=config.num_key_value_heads,
            head_width=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            mask=self.mask(config), mlp="gated", norm="rms", norm_eps=config.rms_norm_eps, final_norm=True,
            **rotary(config, share), **fields,
        )  # fmt: skip

    def mask(self, config: Any) -> str:
        """Llama's code reads no window and Mistral's no kinds of layers, whatever their configs say."""
        if config.model_type == "llama":
            return "causal"
        return sliding(config) if config.model_type == "mistral" else masks(config)

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """With norms on queries and keys, where there are any."""
        return read_block(block, {**self.parts, **(QUERY_NORMS if arch.query_norm else {})}, arch)

    def tiny_configs(self) -> dict[str, Any]:
        """One of each, with grouped heads; stretched positions of every scheme, windows."""
        from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

        small: dict[str, Any] = {**SMALL_TEXT, **NO_TOKENS, "num_key_value_heads": 2, "intermediate_size": 24}
        stretched: dict[str, Any] = {"rope_theta": 500000.0, "factor": 8.0}
        llama3: dict[str, Any] = {
            "rope_type": "llama3",
            **stretched,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
        yarn: dict[str, Any] = {"rope_type": "yarn", **stretched, "original_max_position_embeddings": 16}
        dynamic: dict[str, Any] = {"rope_type": "dynamic", **stretched}
        linear: dict[str, Any] = {"rope_type": "linear", **stretched}
        return {
            "llama": LlamaConfig(**small),
            "llama 3 positions": LlamaConfig(**small, rope_parameters=llama3),
            "dynamic positions": LlamaConfig(**small, rope_parameters=dynamic),
            "linear positions": MistralConfig(**small, sliding_window=None, rope_parameters=linear),
            "mistral": MistralConfig(**small, sliding_window=4),
            "qwen 2": Qwen2Config(**small, use_sliding_window=True, sliding_window=3, max_window_layers=1),
            "qwen 3": Qwen3Config(**small, head_dim=8),
            "yarn positions": Qwen3Config(**small, head_dim=8, rope_parameters=yarn),
        }

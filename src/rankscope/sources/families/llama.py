"""Llama and its kin: RMSNorm before, rotary positions, grouped heads, gated MLP."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.families.family import SMALL_TEXT, Family, Tensors, architecture_from, projections, read_block
from rankscope.sources.families.rotary import masks, rotary, sliding

SMALL_GROUPED: dict[str, Any] = {
    **SMALL_TEXT, **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")), "num_key_value_heads": 2,
    "intermediate_size": 24,
}  # fmt: skip
"""Sizes of small configs with grouped heads, whose vocabulary is smaller than the usual special ids."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
QUERY_NORMS = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}


def _rope(scheme: str, **fields: int | float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": scheme, "rope_theta": 500000.0, "factor": 8.0, **fields}}


class Llama(Family):
    """Llama, Mistral (windows), Qwen 2 (biases) and Qwen 3 (norms on queries and keys)."""

    name = "llama"
    types: ClassVar[tuple[str, ...]] = ("llama", "mistral", "qwen2", "qwen3")
    stack, final_norm = "layers", "norm"
    parts: ClassVar = {
        **projections("self_attn", "q_proj k_proj v_proj o_proj"),
        "attention_norm": "input_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
        "mlp_norm": "post_attention_layernorm",
    }
    embedding_parts: ClassVar = {"words": "embed_tokens"}
    tiny_fields: ClassVar = {
        "llama": ("LlamaConfig", SMALL_GROUPED),
        "llama 3 positions": ("LlamaConfig", SMALL_GROUPED | _rope("llama3", **LLAMA3)),
        "dynamic positions": ("LlamaConfig", SMALL_GROUPED | _rope("dynamic")),
        "linear positions": ("MistralConfig", SMALL_GROUPED | _rope("linear") | {"sliding_window": None}),
        "mistral": ("MistralConfig", SMALL_GROUPED | {"sliding_window": 4}),
        "qwen 2": (
            "Qwen2Config",
            SMALL_GROUPED | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
        ),
        "qwen 3": ("Qwen3Config", SMALL_GROUPED | {"head_dim": 8}),
        "yarn positions": (
            "Qwen3Config",
            SMALL_GROUPED | _rope("yarn", original_max_position_embeddings=16) | {"head_dim": 8},
        ),
    }

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

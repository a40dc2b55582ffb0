"""Llama and its kin: RMSNorm before, rotary positions, grouped heads, gated MLP."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.families.family import Family, Tensors, architecture_from, layout, read_block
from rankscope.sources.families.rotary import masks, rotary, sliding

QUERY_NORMS = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}
WITHOUT_WINDOWS = ("llama", "gemma", "olmo2")  # Types whose code reads no window


class Llama(Family):
    """Llama, Mistral (windows), Qwen 2 (biases) and Qwen 3 (norms on queries and keys)."""

    name = "llama"
    types: ClassVar[tuple[str, ...]] = ("llama", "mistral", "qwen2", "qwen3")
    stack, final_norm = "layers", "norm"
    parts: ClassVar = layout(
        "self_attn", "q_proj k_proj v_proj o_proj",
        norms="input_layernorm post_attention_layernorm", mlp="mlp.gate_proj mlp.up_proj mlp.down_proj",
    )  # fmt: skip
    embedding_parts: ClassVar = {"words": "embed_tokens"}

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
        """Some read no window and Mistral's code no kinds of layers, whatever their configs say."""
        if config.model_type in WITHOUT_WINDOWS:
            return "causal"
        return sliding(config) if config.model_type == "mistral" else masks(config)

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """With norms on queries and keys, where there are any."""
        return read_block(block, {**self.parts, **(QUERY_NORMS if arch.query_norm else {})}, arch)


class Qwen2VL(Llama):
    """The text model of Qwen2-VL and Qwen2.5-VL on text alone, where its three kinds of positions are one."""

    name, inside = "qwen2_vl", "language_model"
    types = ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text")

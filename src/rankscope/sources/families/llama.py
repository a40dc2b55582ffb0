"""Llama and its kin: RMSNorm before, rotary positions, grouped heads, gated MLP."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.families.family import Family, Tensors, architecture_from, layout, read_block
from rankscope.sources.families.rotary import masks, rotary, sliding

QUERY_NORMS = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}
WITHOUT_WINDOWS = ("llama", "gemma", "olmo2", "qwen3_vl_text")  # Types whose code reads no window


class Llama(Family):
    """Llama, Mistral and Ministral 3 (windows; of Mistral 3 the text model), Qwen 2 (biases) and Qwen 3 (norms on
    queries and keys)."""

    name = "llama"
    types: ClassVar[tuple[str, ...]] = ("llama", "mistral", "mistral3", "ministral3", "qwen2", "qwen3")
    inside = "language_model"  # of Mistral 3, which sees images too
    stack, final_norm = "layers", "norm"
    parts: ClassVar = layout(
        "self_attn", "q_proj k_proj v_proj o_proj",
        norms="input_layernorm post_attention_layernorm", mlp="mlp.gate_proj mlp.up_proj mlp.down_proj",
    )  # fmt: skip
    embedding_parts: ClassVar = {"words": "embed_tokens"}

    def architecture(self, config: Any) -> Architecture:
        """Pre-norm with a last norm."""
        arch = self.gated(config, norm_place="pre", query_norm=config.model_type.startswith("qwen3"))
        if config.model_type != "ministral3":
            return arch
        grows = config.rope_parameters["original_max_position_embeddings"]  # beyond it, queries grow with position
        return arch.replace(rotary_reach=min(arch.rotary_reach or grows, grows))

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
        return sliding(config) if config.model_type in ("mistral", "ministral3") else masks(config)

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """With norms on queries and keys, where there are any."""
        return read_block(block, {**self.parts, **(QUERY_NORMS if arch.query_norm else {})}, arch)


class SmolLM3(Llama):
    """SmolLM3, of whose layers every fourth has no positions."""

    name, types = "smollm3", ("smollm3",)

    def architecture(self, config: Any) -> Architecture:
        """Angles of zero where a layer has no positions."""
        arch, kinds = super().architecture(config), config.no_rope_layers[: config.num_hidden_layers]
        angles, scale = arch.rotary_frequencies[0], arch.rotary_scale_of(0)
        return arch.replace(
            rotary_frequencies=tuple(angles if turned else (0.0,) * len(angles) for turned in kinds),
            rotary_scales=() if scale == 1.0 else tuple(scale if turned else 1.0 for turned in kinds),
        )


class Qwen2VL(Llama):
    """The text model of Qwen2-VL, Qwen2.5-VL and Qwen3-VL on text alone, where its three kinds of positions are one."""

    name, inside = "qwen2_vl", "language_model"
    types = ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl", "qwen3_vl_text")

"""Llama and its kin: RMSNorm before, rotary positions, grouped heads, gated MLP; Gemma in a sandwich of norms."""

import math
from typing import Any, ClassVar

from rankscope.nets import Architecture, Linear
from rankscope.sources.families.family import PRE, Family, refuse_others, usual_head_width
from rankscope.sources.families.parts import ModulePaths, Tensors, heads_in, layout, matrix, without
from rankscope.sources.families.rotary import masks, partly_rotary, rotary, sliding

WITHOUT_WINDOWS = ("llama", "gemma", "olmo2", "qwen3_vl_text")  # Types whose code reads no window


def mask_of(config: Any) -> str:
    """Some read no window and Mistral's code no kinds of layers, whatever their configs say."""
    if config.model_type in WITHOUT_WINDOWS:
        return "causal"
    return sliding(config) if config.model_type in ("mistral", "ministral3") else masks(config)


class Llama(Family):
    """Llama, Mistral and Ministral 3 (windows; of Mistral 3 the text model), Qwen 2 (biases) and Qwen 3 (norms on
    queries and keys)."""

    name = "llama"
    types: ClassVar[tuple[str, ...]] = ("llama", "mistral", "mistral3", "ministral3", "qwen2", "qwen3")
    inside = "language_model"  # of Mistral 3, which sees images too
    stack, final_norm = "layers", "norm"
    parts: ClassVar[ModulePaths] = {
        **layout("self_attn", "q_proj k_proj v_proj o_proj", norms="input_layernorm post_attention_layernorm",
                 mlp="mlp.gate_proj mlp.up_proj mlp.down_proj"),
        "attention.query_norm": "self_attn.q_norm or none", "attention.key_norm": "self_attn.k_norm or none",
    }  # fmt: skip
    embedding_parts: ClassVar = {"words": "embed_tokens"}
    fixed: ClassVar[dict[str, Any]] = {**PRE, "mlp": "gated", "norm": "rms"}
    reads: ClassVar = {
        "key_heads": "num_key_value_heads", "norm_eps": "rms_norm_eps", "mask": mask_of,
        "head_width": lambda config: getattr(config, "head_dim", None) or usual_head_width(config),
        "query_norm": lambda config: config.model_type.startswith("qwen3"),
    }  # fmt: skip
    further: ClassVar[Any] = (rotary,)

    def architecture(self, config: Any) -> Architecture:
        """The description; of Ministral 3 only as far as its queries do not grow with position."""
        arch = self.described(config)
        if config.model_type != "ministral3":
            return arch
        grows = config.rope_parameters["original_max_position_embeddings"]  # beyond it, queries grow with position
        return arch.replace(rotary_reach=min(arch.rotary_reach or grows, grows))


class SmolLM3(Llama):
    """SmolLM3, of whose layers every fourth has no positions."""

    name, types = "smollm3", ("smollm3",)

    def architecture(self, config: Any) -> Architecture:
        """Llama's architecture, with rotary angles of zero in the layers that have no positions."""
        arch, kinds = super().architecture(config), config.no_rope_layers[: config.num_hidden_layers]
        angles, scale = arch.rotary_frequencies[0], arch.rotary_scale_of(0)
        return arch.replace(
            rotary_frequencies=tuple(angles if turned else (0.0,) * len(angles) for turned in kinds),
            rotary_scales=() if scale == 1.0 else tuple(scale if turned else 1.0 for turned in kinds),
        )


Qwen2VL = Llama.like(
    "qwen2_vl",
    "The text model of Qwen2-VL, Qwen2.5-VL and Qwen3-VL on text alone, where its three kinds of positions are one.",
    types=("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl", "qwen3_vl_text"),
)
OLMo2 = Llama.like(
    "olmo2",
    "OLMo 2 and 3 (windows in most layers), whose queries and keys go through one norm of all heads together.",
    types=("olmo2", "olmo3"),
    parts=without(Llama.parts, "attention_norm", "mlp_norm") | {
        "attention_after": "post_attention_layernorm", "mlp_after": "post_feedforward_layernorm",
    },
    fixed={**Llama.fixed, "norm_place": "output", "query_norm": True, "query_norm_across": True},
)  # fmt: skip


class Phi3(Llama):
    """Phi-3, Phi-3.5 and Phi-4 mini: heads rotated in part, one window for all layers, longrope."""

    name, types = "phi3", ("phi3",)
    fused: ClassVar = ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up")
    parts: ClassVar = without(Llama.parts, *fused) | {"mlp.gate, mlp.up": "mlp.gate_up_proj"}
    reads: ClassVar = {**Llama.reads, "mask": sliding}
    further = (partly_rotary,)

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """Queries, then keys, then values: of each kind so many heads."""
        tensors, fused = super().layer(block, arch), block.self_attn.qkv_proj
        heads = {"query": arch.heads, "key": arch.key_heads, "value": arch.key_heads}
        parts = matrix(fused).split([count * arch.head_width for count in heads.values()], 1)  # type: ignore[no-untyped-call]
        for (name, count), part in zip(heads.items(), parts, strict=True):
            tensors |= heads_in(f"attention.{name}", Linear(part), count)
        return tensors


class Gemma(Llama):
    """Gemma, the first. Its norms multiply by 1 + weight."""

    name, gain_at_zero = "gemma", 1.0
    types: ClassVar[tuple[str, ...]] = ("gemma",)
    embedding_parts: ClassVar = {**Llama.embedding_parts, "scale": "embed_tokens.embed_scale"}  # about the width's root

    def architecture(self, config: Any) -> Architecture:
        """Llama's; refused where every token sees every other."""
        if config.use_bidirectional_attention:
            refuse_others(config, use_bidirectional_attention=False)
        return super().architecture(config)


Gemma3 = Gemma.like(
    "gemma3", "The text model of Gemma 3.", types=("gemma3_text", "gemma3"),
    parts={
        **Llama.parts, "attention_after": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm", "mlp_after": "post_feedforward_layernorm",
    },
    fixed={**Llama.fixed, "norm_place": "sandwich", "query_norm": True},
    reads={
        **Llama.reads, "activation": "hidden_activation",
        "divisor": lambda config: math.sqrt(config.query_pre_attn_scalar),
    },
    only={"attn_logit_softcapping": None},
)  # fmt: skip
Gemma2 = Gemma3.like(
    "gemma2", "Gemma 2. Every other layer has a window; a cap of scores comes after the divisor.", types=("gemma2",),
    fixed={**Gemma3.fixed, "query_norm": False}, only={},
    reads={**Gemma3.reads, "score_cap": lambda config: config.attn_logit_softcapping or 0.0},
)  # fmt: skip

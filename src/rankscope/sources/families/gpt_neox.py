"""GPT-NeoX (Pythia): parallel branches, rotary positions on a part of each head."""

from typing import Any

from rankscope.nets import Architecture
from rankscope.sources.embedding import TextEmbedding
from rankscope.sources.families.family import Family, Tensors, activation, dense, heads_out, norm
from rankscope.sources.families.rotary import angles


class GPTNeoX(Family):
    """GPT-NeoX, parallel or serial."""

    name = "gpt_neox"
    types = ("gpt_neox",)

    def architecture(self, config: Any) -> Architecture:
        """Pre-norm with a last norm."""
        return Architecture(
            layers=config.num_hidden_layers, width=config.hidden_size, heads=config.num_attention_heads,
            mlp_width=config.intermediate_size, activation=activation(config.hidden_act), mask="causal",
            norm_place="pre", norm_eps=config.layer_norm_eps, final_norm=True, positions="rotary",
            rotary_share=config.rope_parameters.get("partial_rotary_factor", 1.0),
            rotary_frequencies=angles(config), parallel=config.use_parallel_residual,
        )  # fmt: skip

    def blocks(self, model: Any) -> list[Any]:
        """The layers."""
        return list(model.layers)

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """Fused by head: [head, (query, key, value), head_width]."""
        fused = block.attention.query_key_value
        weight = fused.weight.unflatten(0, (arch.heads, 3, arch.head_width))
        parts: Tensors = {}
        for place, name in enumerate(("query", "key", "value")):
            parts[f"attention.{name}.weight"] = weight[:, place].permute(2, 0, 1)
            if fused.bias is not None:
                bias = fused.bias.unflatten(0, (arch.heads, 3, arch.head_width))
                parts[f"attention.{name}.bias"] = bias[:, place]
        return {
            **parts,
            **heads_out(block.attention.dense, arch.heads),
            **norm("attention_norm", block.input_layernorm),
            **dense("mlp.up", block.mlp.dense_h_to_4h),
            **dense("mlp.down", block.mlp.dense_4h_to_h),
            **norm("mlp_norm", block.post_attention_layernorm),
        }

    def others(self, model: Any) -> Tensors:
        """The last norm."""
        return norm("final_norm", model.final_layer_norm)

    def embedding(self, model: Any) -> TextEmbedding:
        """Words alone."""
        return TextEmbedding(words=model.embed_in.weight.detach())

    def tiny(self) -> dict[str, Any]:
        """Parallel with a quarter rotated, and serial."""
        from transformers import GPTNeoXConfig

        small: dict[str, Any] = {
            "vocab_size": 60,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 24,
            "max_position_embeddings": 32,
        }
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
        return {
            "parallel": GPTNeoXConfig(**small, rope_parameters={**rope, "partial_rotary_factor": 0.25}),
            "serial": GPTNeoXConfig(
                **small, use_parallel_residual=False, rope_parameters={**rope, "partial_rotary_factor": 1.0}
            ),
        }

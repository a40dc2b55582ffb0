"""Gemma 3: Llama's parts in a sandwich of norms, norms on queries and keys, windows in most layers."""

import math
from typing import Any

from rankscope.nets import Architecture
from rankscope.sources.embedding import TextEmbedding
from rankscope.sources.families.family import Tensors, activation, refuse
from rankscope.sources.families.llama import Llama
from rankscope.sources.families.rotary import angles, masks


class Gemma3(Llama):
    """The text model of Gemma 3. Its norms multiply by 1 + weight."""

    name = "gemma3"
    types = ("gemma3_text", "gemma3")

    def core(self, model: Any) -> Any:
        """The language model of a model that also sees."""
        base = super().core(model)
        return getattr(base, "language_model", base)

    def architecture(self, config: Any) -> Architecture:
        """A sandwich; local and global layers have angles of their own."""
        refuse(config, attn_logit_softcapping=None, use_bidirectional_attention=False)
        return Architecture(
            layers=config.num_hidden_layers, width=config.hidden_size, heads=config.num_attention_heads,
            key_heads=config.num_key_value_heads, head_width=config.head_dim,
            divisor=math.sqrt(config.query_pre_attn_scalar), mask=masks(config), positions="rotary",
            rotary_frequencies=angles(config), mlp="gated", mlp_width=config.intermediate_size,
            activation=activation(config.hidden_activation), norm="rms", norm_place="sandwich",
            norm_eps=config.rms_norm_eps, final_norm=True, query_norm=True,
        )  # fmt: skip

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """Llama's, and two more norms."""
        parts = super().layer(block, arch)
        parts["mlp_norm.gain"] = block.pre_feedforward_layernorm.weight
        parts["attention_after.gain"] = block.post_attention_layernorm.weight
        parts["mlp_after.gain"] = block.post_feedforward_layernorm.weight
        return {name: 1.0 + part if name.endswith(".gain") else part for name, part in parts.items()}

    def others(self, model: Any) -> Tensors:
        """The last norm."""
        return {"final_norm.gain": 1.0 + model.norm.weight}

    def embedding(self, model: Any) -> TextEmbedding:
        """Words, scaled by about the root of the width."""
        words = model.embed_tokens
        return TextEmbedding(words=words.weight.detach(), scale=float(words.embed_scale))

    def tiny(self) -> dict[str, Any]:
        """Two local layers to one global."""
        from transformers import Gemma3TextConfig

        small: dict[str, Any] = {
            "vocab_size": 60,
            "hidden_size": 16,
            "num_hidden_layers": 3,
            "head_dim": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 24,
            "max_position_embeddings": 32,
            "query_pre_attn_scalar": 12,
            "sliding_window": 4,
            "sliding_window_pattern": 3,
        }
        return {"text": Gemma3TextConfig(**small)}

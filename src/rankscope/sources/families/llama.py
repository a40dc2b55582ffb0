"""Llama and its kin: RMSNorm before, rotary positions, grouped heads, gated MLP."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.embedding import TextEmbedding
from rankscope.sources.families.family import Family, Tensors, activation, dense, heads_in, heads_out, norm
from rankscope.sources.families.rotary import angles, masks


class Llama(Family):
    """Llama, Mistral (windows), Qwen 2 (biases) and Qwen 3 (norms on queries and keys)."""

    name = "llama"
    types: ClassVar[tuple[str, ...]] = ("llama", "mistral", "qwen2", "qwen3")

    def architecture(self, config: Any) -> Architecture:
        """Pre-norm with a last norm."""
        return Architecture(
            layers=config.num_hidden_layers, width=config.hidden_size, heads=config.num_attention_heads,
            key_heads=config.num_key_value_heads,
            head_width=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            mask=masks(config), positions="rotary", rotary_frequencies=angles(config), mlp="gated",
            mlp_width=config.intermediate_size, activation=activation(config.hidden_act), norm="rms",
            norm_place="pre", norm_eps=config.rms_norm_eps, final_norm=True,
            query_norm=config.model_type == "qwen3",
        )  # fmt: skip

    def blocks(self, model: Any) -> list[Any]:
        """The decoder's layers."""
        return list(model.layers)

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """Query, key and value apart; gate, up and down."""
        attention, mlp = block.self_attn, block.mlp
        normed = norm("attention.query_norm", attention.q_norm) if arch.query_norm else {}
        normed |= norm("attention.key_norm", attention.k_norm) if arch.query_norm else {}
        return {
            **heads_in("query", attention.q_proj, arch.heads),
            **heads_in("key", attention.k_proj, arch.key_heads),
            **heads_in("value", attention.v_proj, arch.key_heads),
            **heads_out(attention.o_proj, arch.heads),
            **normed,
            **norm("attention_norm", block.input_layernorm),
            **dense("mlp.gate", mlp.gate_proj),
            **dense("mlp.up", mlp.up_proj),
            **dense("mlp.down", mlp.down_proj),
            **norm("mlp_norm", block.post_attention_layernorm),
        }

    def others(self, model: Any) -> Tensors:
        """The last norm."""
        return norm("final_norm", model.norm)

    def embedding(self, model: Any) -> TextEmbedding:
        """Words alone."""
        return TextEmbedding(words=model.embed_tokens.weight.detach())

    def tiny(self) -> dict[str, Any]:
        """One of each, with grouped heads; Llama with stretched positions, Mistral with a window."""
        from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

        small: dict[str, Any] = {
            "vocab_size": 60,
            "hidden_size": 16,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 24,
            "max_position_embeddings": 32,
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        stretched: dict[str, Any] = {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
        return {
            "llama": LlamaConfig(**small),
            "llama 3 positions": LlamaConfig(**small, rope_parameters=stretched),
            "mistral": MistralConfig(**small, sliding_window=4),
            "qwen 2": Qwen2Config(**small, use_sliding_window=True, sliding_window=3, max_window_layers=1),
            "qwen 3": Qwen3Config(**small, head_dim=8),
        }

"""Falcon: GPT-NeoX's parallel blocks, with few heads of keys and values."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.families.family import Family, Tensors, architecture_from, read_block, require
from rankscope.sources.families.rotary import rotary


class Falcon(Family):
    """Falcon with rotary positions: one or two norms before parallel branches, or serial ones."""

    name, types = "falcon", ("falcon",)
    stack, final_norm = "h", "ln_f"
    parts: ClassVar = {
        "attention.output": "self_attention.dense",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    }
    embedding_parts: ClassVar = {"words": "word_embeddings"}

    def architecture(self, config: Any) -> Architecture:
        """Pre-norm with a last norm."""
        require(config, alibi=False)
        grouped = config.new_decoder_architecture or not config.multi_query
        return architecture_from(
            config, key_heads=config.num_kv_heads if grouped else 1, mlp_width=config.ffn_hidden_size,
            activation=config.activation, mask="causal", norm_place="pre", norm_eps=config.layer_norm_epsilon,
            final_norm=True, parallel=config.parallel_attn, **rotary(config),
        )  # fmt: skip

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """Fused by group: its queries, its key, its value."""
        first = "ln_attn" if hasattr(block, "ln_attn") else "input_layernorm"
        last = "ln_mlp" if hasattr(block, "ln_mlp") else first if arch.parallel else "post_attention_layernorm"
        tensors = read_block(block, {**self.parts, "attention_norm": first, "mlp_norm": last}, arch)
        for kind, fused in block.self_attention.query_key_value.named_parameters():
            by_group = fused.unflatten(0, (arch.key_heads, -1, arch.head_width))
            parts = {"query": by_group[:, :-2].flatten(0, 1), "key": by_group[:, -2], "value": by_group[:, -1]}
            for name, part in parts.items():
                tensors[f"attention.{name}.{kind}"] = part if kind == "bias" else part.permute(2, 0, 1)
        return tensors

    def prepare_for_float64(self, model: Any) -> Any:
        """Eager attention, to which transformers does not switch it: with another, its code gives patterns of tokens
        that see what comes after them."""
        model.config._attn_implementation = "eager"
        return model

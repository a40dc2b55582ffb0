"""GPT-2 (one fused projection) and GPT-NeoX (parallel branches, rotary positions): causal, pre-norm."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.families.family import Family, Tensors, architecture_from, require
from rankscope.sources.families.rotary import rotary


class GPT2(Family):
    """GPT-2, with its two scalings of scores folded into the queries."""

    name, types = "gpt2", ("gpt2",)
    stack, final_norm = "h", "ln_f"
    parts: ClassVar = {
        "attention.query, attention.key, attention.value": "attn.c_attn",
        "attention.output": "attn.c_proj",
        "attention_norm": "ln_1",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
        "mlp_norm": "ln_2",
    }
    embedding_parts: ClassVar = {"words": "wte", "positions": "wpe"}

    def architecture(self, config: Any) -> Architecture:
        """Pre-norm with a last norm."""
        require(config, add_cross_attention=False)
        return architecture_from(
            config, mlp_width=config.n_inner or 4 * config.n_embd, mask="causal", norm_place="pre",
            activation=config.activation_function, norm_eps=config.layer_norm_epsilon,
            final_norm=True,
        )  # fmt: skip

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """A scaling of its own per layer goes into the query."""
        scale = block.attn.scaling * arch.divisor
        tensors = super().layer(block, arch)
        return {name: scale * part if ".query." in name else part for name, part in tensors.items()}

    def prepare_for_float64(self, model: Any) -> Any:
        """Attention upcast to float32 (Stanford's GPT-2) fails on scores in float64; without the upcast it is
        the usual one."""
        for block in model.h:
            block.attn.reorder_and_upcast_attn = False
        return model


class GPTNeoX(Family):
    """GPT-NeoX with parallel or serial branches."""

    name, types = "gpt_neox", ("gpt_neox",)
    stack, final_norm = "layers", "final_layer_norm"
    parts: ClassVar = {
        "attention.output": "attention.dense",
        "attention_norm": "input_layernorm",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
        "mlp_norm": "post_attention_layernorm",
    }
    embedding_parts: ClassVar = {"words": "embed_in"}

    def architecture(self, config: Any) -> Architecture:
        """Pre-norm with a last norm."""
        share = config.rope_parameters.get("partial_rotary_factor", 1.0)
        return architecture_from(
            config, mask="causal", norm_place="pre", norm_eps=config.layer_norm_eps, final_norm=True,
            rotary_share=share, **rotary(config, share), parallel=config.use_parallel_residual,
        )  # fmt: skip

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """Fused by head: [head, (query, key, value), head_width]."""
        tensors = super().layer(block, arch)
        for kind, fused in block.attention.query_key_value.named_parameters():
            by_head = fused.unflatten(0, (arch.heads, 3, arch.head_width))
            for name, part in zip(("query", "key", "value"), by_head.unbind(1), strict=True):
                tensors[f"attention.{name}.{kind}"] = part if kind == "bias" else part.permute(2, 0, 1)
        return tensors

"""GPT-NeoX: causal, pre-norm, parallel branches, rotary positions."""

from operator import attrgetter
from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.families.family import Family, Tensors, architecture_from
from rankscope.sources.families.rotary import rotary


class GPTNeoX(Family):
    """GPT-NeoX with parallel or serial branches."""

    name, types = "gpt_neox", ("gpt_neox",)
    stack, final_norm = "layers", "final_layer_norm"
    fused: ClassVar[str] = "attention.query_key_value"  # Path of the map to queries, keys and values
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
        for kind, fused in attrgetter(self.fused)(block).named_parameters():
            by_head = fused.unflatten(0, (arch.heads, 3, arch.head_width))
            for name, part in zip(("query", "key", "value"), by_head.unbind(1), strict=True):
                tensors[f"attention.{name}.{kind}"] = part if kind == "bias" else part.permute(2, 0, 1)
        return tensors

"""Phi 1, 1.5 and 2: causal, parallel branches that read through one norm."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.families.family import Family, architecture_from, layout, require
from rankscope.sources.families.rotary import rotary


class Phi(Family):
    """Phi 1, 1.5 and 2, whose heads are rotated in part."""

    name, types = "phi", ("phi",)
    stack, final_norm = "layers", "final_layernorm"
    parts: ClassVar = layout(
        "self_attn", "q_proj k_proj v_proj dense", norms="input_layernorm input_layernorm", mlp="mlp.fc1 mlp.fc2"
    )
    embedding_parts: ClassVar = {"words": "embed_tokens"}

    def architecture(self, config: Any) -> Architecture:
        """Pre-norm with a last norm."""
        require(config, qk_layernorm=False)
        share = config.rope_parameters.get("partial_rotary_factor", 1.0)
        return architecture_from(
            config, key_heads=config.num_key_value_heads, mask="causal", norm_place="pre",
            norm_eps=config.layer_norm_eps, final_norm=True, rotary_share=share, **rotary(config, share), parallel=True,
        )  # fmt: skip

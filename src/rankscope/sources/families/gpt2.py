"""GPT-2: causal, pre-norm, one fused projection."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.families.family import Family, Tensors, architecture_from, require


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

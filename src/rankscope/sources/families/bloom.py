"""BLOOM: GPT-2's blocks with ALiBi, queries, keys and values fused head by head as in GPT-NeoX."""

from typing import Any, ClassVar

from torch import nn

from rankscope.nets import Architecture
from rankscope.sources.families.family import architecture_from, require
from rankscope.sources.families.gpt_neox import GPTNeoX


class Bloom(GPTNeoX):
    """BLOOM: causal, pre-norm, with scores that fall with distance.

    Its code has `sqrt(2 / pi)` in its gelu to eight digits, and is compared with all of them."""

    name, types = "bloom", ("bloom",)
    stack, final_norm, fused = "h", "ln_f", "self_attention.query_key_value"
    parts: ClassVar = {**GPTNeoX.parts, "attention.output": "self_attention.dense"}
    embedding_parts: ClassVar = {"words": "word_embeddings", "norm": "word_embeddings_layernorm"}

    def architecture(self, config: Any) -> Architecture:
        """Pre-norm with a last norm."""
        require(config, apply_residual_connection_post_layernorm=False)
        return architecture_from(
            config, mlp_width=4 * config.hidden_size, activation="gelu_new", mask="causal", positions="alibi",
            norm_place="pre", norm_eps=config.layer_norm_epsilon, final_norm=True,
        )  # fmt: skip

    def prepare_for_float64(self, model: Any) -> Any:
        """A gelu of its own, without the eight digits."""
        for block in model.h:
            block.mlp.gelu_impl = nn.GELU("tanh")
        return model

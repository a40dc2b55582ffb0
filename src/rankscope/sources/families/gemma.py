"""Gemma 2 and 3: Llama's parts in a sandwich of norms, windows in some layers."""

import math
from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.embedding import TextEmbedding
from rankscope.sources.families.family import Tensors, gains_from_one, require
from rankscope.sources.families.llama import Llama


class Gemma3(Llama):
    """The text model of Gemma 3. Its norms multiply by 1 + weight."""

    name = "gemma3"
    inside = "language_model"
    types: ClassVar[tuple[str, ...]] = ("gemma3_text", "gemma3")
    parts: ClassVar = {
        **Llama.parts,
        "attention_after": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_after": "post_feedforward_layernorm",
    }

    def architecture(self, config: Any) -> Architecture:
        """A sandwich; local and global layers have angles of their own."""
        require(config, attn_logit_softcapping=None)
        return self.sandwich(config, query_norm=True)

    def sandwich(self, config: Any, **fields: Any) -> Architecture:
        """What Gemma 2 and 3 share."""
        if config.use_bidirectional_attention:
            require(config, use_bidirectional_attention=False)
        return self.gated(
            config, norm_place="sandwich", activation=config.hidden_activation,
            divisor=math.sqrt(config.query_pre_attn_scalar), **fields,
        )  # fmt: skip

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """Llama's, and two more norms."""
        return gains_from_one(super().layer(block, arch))

    def other_tensors(self, model: Any) -> Tensors:
        """The last norm, as gain one plus weight."""
        return gains_from_one(super().other_tensors(model))

    def embedding(self, model: Any) -> TextEmbedding:
        """Words, scaled by about the root of the width."""
        return self.text(model, scale=float(model.embed_tokens.embed_scale))


class Gemma2(Gemma3):
    """Gemma 2. Every other layer has a window."""

    name, types = "gemma2", ("gemma2",)

    def architecture(self, config: Any) -> Architecture:
        """A sandwich; the cap comes after the divisor."""
        return self.sandwich(config, score_cap=config.attn_logit_softcapping or 0.0)

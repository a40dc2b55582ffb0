"""Gemma: Llama's parts; in 2 and 3 in a sandwich of norms, with windows in some layers."""

import math
from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.embedding import TextEmbedding
from rankscope.sources.families.family import GainsFromOne, refuse_others
from rankscope.sources.families.llama import Llama


class Gemma(GainsFromOne, Llama):
    """Gemma, the first. Its norms multiply by 1 + weight."""

    name = "gemma"
    types: ClassVar[tuple[str, ...]] = ("gemma",)

    def architecture(self, config: Any) -> Architecture:
        """Pre-norm with a last norm."""
        return self.gated(config)

    def gated(self, config: Any, **fields: Any) -> Architecture:
        """Llama's; refused where every token sees every other."""
        if config.use_bidirectional_attention:
            refuse_others(config, use_bidirectional_attention=False)
        return super().gated(config, **fields)

    def embedding(self, model: Any) -> TextEmbedding:
        """Words, scaled by about the root of the width."""
        return self.text(model, scale=float(model.embed_tokens.embed_scale))


class Gemma3(Gemma):
    """The text model of Gemma 3."""

    name = "gemma3"
    types: ClassVar[tuple[str, ...]] = ("gemma3_text", "gemma3")
    parts: ClassVar = {
        **Llama.parts,
        "attention_after": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_after": "post_feedforward_layernorm",
    }
    fixed: ClassVar = {**Llama.fixed, "norm_place": "sandwich"}
    reads: ClassVar = {**Llama.reads, "activation": "hidden_activation"}
    only: ClassVar = {"attn_logit_softcapping": None}

    def architecture(self, config: Any) -> Architecture:
        """Norms on queries and keys; local and global layers have angles of their own."""
        return self.gated(config, divisor=math.sqrt(config.query_pre_attn_scalar), query_norm=True)


class Gemma2(Gemma3):
    """Gemma 2. Every other layer has a window."""

    name, types = "gemma2", ("gemma2",)
    only: ClassVar = {}

    def architecture(self, config: Any) -> Architecture:
        """A cap of scores, which comes after the divisor."""
        cap, divisor = config.attn_logit_softcapping or 0.0, math.sqrt(config.query_pre_attn_scalar)
        return self.gated(config, divisor=divisor, score_cap=cap)

"""Gemma: Llama's parts; in 2 and 3 in a sandwich of norms, with windows in some layers."""

import math
from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.embedding import TextEmbedding
from rankscope.sources.families.family import Tensors, gains_from_one, require
from rankscope.sources.families.llama import Llama


class Gemma(Llama):
    """Gemma, the first. Its norms multiply by 1 + weight."""

    name, inside = "gemma", "language_model"
    types: ClassVar[tuple[str, ...]] = ("gemma",)

    def architecture(self, config: Any) -> Architecture:
        """Pre-norm with a last norm."""
        refuse_encoder(config)
        return self.gated(config, norm_place="pre")

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """Llama's, and two more norms where they are a sandwich."""
        return gains_from_one(super().layer(block, arch))

    def other_tensors(self, model: Any) -> Tensors:
        """The last norm, as gain one plus weight."""
        return gains_from_one(super().other_tensors(model))

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

    def architecture(self, config: Any) -> Architecture:
        """A sandwich; local and global layers have angles of their own."""
        require(config, attn_logit_softcapping=None)
        return self.sandwich(config, query_norm=True)

    def sandwich(self, config: Any, **fields: Any) -> Architecture:
        """What Gemma 2 and 3 share."""
        refuse_encoder(config)
        return self.gated(
            config, norm_place="sandwich", activation=config.hidden_activation,
            divisor=math.sqrt(config.query_pre_attn_scalar), **fields,
        )  # fmt: skip


class Gemma2(Gemma3):
    """Gemma 2. Every other layer has a window."""

    name, types = "gemma2", ("gemma2",)

    def architecture(self, config: Any) -> Architecture:
        """A sandwich; the cap comes after the divisor."""
        return self.sandwich(config, score_cap=config.attn_logit_softcapping or 0.0)


def refuse_encoder(config: Any) -> None:
    """Raise `SourceError` where every token sees every other."""
    if config.use_bidirectional_attention:
        require(config, use_bidirectional_attention=False)

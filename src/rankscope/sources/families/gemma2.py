"""Gemma 2: Gemma 3 with capped scores and without norms on queries and keys."""

from typing import Any

from rankscope.nets import Architecture
from rankscope.sources.families.family import SMALL_TEXT
from rankscope.sources.families.gemma3 import Gemma3


class Gemma2(Gemma3):
    """Gemma 2. Every other layer has a window."""

    name = "gemma2"
    types = ("gemma2",)

    def architecture(self, config: Any) -> Architecture:
        """A sandwich; the cap comes after the divisor."""
        return self.sandwich(config, score_cap=config.attn_logit_softcapping or 0.0)

    def tiny_configs(self) -> dict[str, Any]:
        """Scores far below their cap, and near it; with biases."""
        from transformers import Gemma2Config

        sizes = {"head_dim": 8, "num_key_value_heads": 2, "intermediate_size": 24, "sliding_window": 4}
        small: dict[str, Any] = SMALL_TEXT | sizes | {"query_pre_attn_scalar": 12}
        return {
            "text": Gemma2Config(**small),
            "low cap": Gemma2Config(**small, attn_logit_softcapping=0.5, attention_bias=True),
        }

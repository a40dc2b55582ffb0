"""Gemma 2: Gemma 3 with capped scores and without norms on queries and keys."""

from typing import Any

from rankscope.nets import Architecture
from rankscope.sources.families.gemma3 import Gemma3


class Gemma2(Gemma3):
    """Gemma 2. Every other layer has a window."""

    name, types = "gemma2", ("gemma2",)

    def architecture(self, config: Any) -> Architecture:
        """A sandwich; the cap comes after the divisor."""
        return self.sandwich(config, score_cap=config.attn_logit_softcapping or 0.0)

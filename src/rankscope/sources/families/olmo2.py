"""OLMo 2 and 3: Llama's parts, with norms on what branches add instead of what they read."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.families.llama import Llama


class OLMo2(Llama):
    """OLMo 2 and 3 (windows in most layers), whose queries and keys go through one norm of all heads together."""

    name = "olmo2"
    types: ClassVar[tuple[str, ...]] = ("olmo2", "olmo3")
    parts: ClassVar = Llama.without("attention_norm", "mlp_norm") | {
        "attention_after": "post_attention_layernorm",
        "mlp_after": "post_feedforward_layernorm",
    }

    def architecture(self, config: Any) -> Architecture:
        """Norms inside the branches, at their ends, and a last norm."""
        return self.gated(config, norm_place="output", query_norm=True, query_norm_across=True)

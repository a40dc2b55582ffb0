"""Phi-3: Llama's blocks with fused projections."""

from typing import Any, ClassVar

from rankscope.nets import Architecture, Linear
from rankscope.sources.families.family import Tensors, heads_in, matrix, read_block
from rankscope.sources.families.llama import Llama
from rankscope.sources.families.rotary import sliding

FUSED = ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up")


class Phi3(Llama):
    """Phi-3, Phi-3.5 and Phi-4 mini: heads rotated in part, one window for all layers, longrope."""

    name, types = "phi3", ("phi3",)
    parts: ClassVar = Llama.without(*FUSED) | {"mlp.gate, mlp.up": "mlp.gate_up_proj"}

    def architecture(self, config: Any) -> Architecture:
        """Pre-norm with a last norm."""
        share = float(config.rope_parameters.get("partial_rotary_factor", 1.0))
        return self.gated(config, share, norm_place="pre", rotary_share=share)

    def mask(self, config: Any) -> str:
        """One window for all layers, where there is any."""
        return sliding(config)

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """Queries, then keys, then values: of each kind so many heads."""
        tensors, fused = read_block(block, self.parts, arch), block.self_attn.qkv_proj
        heads = {"query": arch.heads, "key": arch.key_heads, "value": arch.key_heads}
        parts = matrix(fused).split([count * arch.head_width for count in heads.values()], 1)  # type: ignore[no-untyped-call]
        for (name, count), part in zip(heads.items(), parts, strict=True):
            tensors |= heads_in(f"attention.{name}", Linear(part), count)
        return tensors

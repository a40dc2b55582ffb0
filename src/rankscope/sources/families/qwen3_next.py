"""Qwen3-Next: Mixtral's blocks with gated heads."""

from typing import Any, ClassVar

from rankscope.errors import SourceError
from rankscope.nets import Architecture
from rankscope.sources.families.family import Tensors, gains_from_one
from rankscope.sources.families.mixtral import Mixtral


class Qwen3Next(Mixtral):
    """Qwen3-Next, whose query projection holds, head by head, the query and the gate. Gains are 1 + w."""

    name = "qwen3_next"
    types: ClassVar[tuple[str, ...]] = ("qwen3_next",)
    parts: ClassVar = Mixtral.without("attention.query")

    def architecture(self, config: Any) -> Architecture:
        """Pre-norm with a last norm."""
        linear = [kind for kind in config.layer_types if kind != "full_attention"]
        if linear:
            message = f"qwen3_next is mapped where every layer is full_attention; {len(linear)} of this config's are"
            raise SourceError(f"{message} {linear[0]}: watch measures it as it is", subject="layer_types")
        share = config.rope_parameters.get("partial_rotary_factor", 1.0)
        gates = {"query_norm": True, "head_gate": True, "rotary_share": share}
        return self.with_experts(self.gated(config, share, norm_place="pre", **gates), config)

    def mask(self, config: Any) -> str:
        """Causal in every layer, without windows."""
        return "causal"

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """Query and gate taken apart."""
        tensors = super().layer(block, arch)
        for kind, fused in block.self_attn.q_proj.named_parameters():
            by_head = fused.unflatten(0, (arch.heads, 2, arch.head_width))
            for name, part in zip(("query", "gate"), by_head.unbind(1), strict=True):
                tensors[f"attention.{name}.{kind}"] = part if kind == "bias" else part.permute(2, 0, 1)
        return gains_from_one(tensors)

    def other_tensors(self, model: Any) -> Tensors:
        """The last norm, as gain one plus weight."""
        return gains_from_one(super().other_tensors(model))

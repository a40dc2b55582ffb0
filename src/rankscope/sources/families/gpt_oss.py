"""gpt-oss: Mixtral's blocks, whose attention has sinks and whose experts are cut off."""

from typing import Any, ClassVar

from rankscope.nets import Architecture, Experts
from rankscope.sources.families.family import Tensors, read_block, require
from rankscope.sources.families.mixtral import Mixtral
from rankscope.sources.families.rotary import masks


class GptOss(Mixtral):
    """gpt-oss: a number of each head takes a part of every row, which then sums to less than one."""

    name = "gpt_oss"
    types: ClassVar[tuple[str, ...]] = ("gpt_oss",)
    parts: ClassVar = Mixtral.without("mlp.gate", "mlp.up", "mlp.down")

    def architecture(self, config: Any) -> Architecture:
        """Pre-norm with a last norm; its gates are those of quick_gelu."""
        require(config, swiglu_alpha=1.702)
        arch = self.gated(config, norm_place="pre", kernel="sink", activation="quick_gelu")
        return self.with_experts(arch, config)

    def mask(self, config: Any) -> str:
        """Windows by the kinds of layers."""
        return masks(config)

    def experts(self, config: Any) -> Experts:
        """Experts weighed by a softmax of the chosen alone."""
        return Experts(
            number=config.num_local_experts, chosen=config.num_experts_per_tok, width=config.intermediate_size,
            renormalised=True, biases=True, limit=config.swiglu_limit,
        )  # fmt: skip

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """Gate and other map of an expert lie entry by entry in one matrix."""
        router, experts = block.mlp.router, block.mlp.experts
        weight, bias = experts.gate_up_proj, experts.gate_up_proj_bias
        return {
            **read_block(block, self.parts, arch),
            "attention.sink": block.self_attn.sinks,
            "experts.router.weight": router.weight.T,
            "experts.router.bias": router.bias,
            "experts.gate.weight": weight[..., ::2].transpose(0, 1),
            "experts.gate.bias": bias[..., ::2],
            "experts.up.weight": weight[..., 1::2].transpose(0, 1),
            "experts.up.bias": bias[..., 1::2],
            "experts.down.weight": experts.down_proj,
            "experts.down.bias": experts.down_proj_bias,
        }

"""Mixtral and its kin: Llama's blocks with a mixture of experts for an MLP."""

from typing import Any, ClassVar

from rankscope.nets import Architecture, Experts
from rankscope.sources.families.family import Tensors, read_block
from rankscope.sources.families.llama import QUERY_NORMS, Llama
from rankscope.sources.families.rotary import masks, sliding


class Mixtral(Llama):
    """Mixtral, Qwen 2 MoE (a shared expert) and Qwen 3 MoE; some layers may have a dense MLP."""

    name = "mixtral"
    types: ClassVar[tuple[str, ...]] = ("mixtral", "qwen2_moe", "qwen3_moe")
    shared: ClassVar = {
        **{f"experts.shared.{name}": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
        "experts.shared_gate": "mlp.shared_expert_gate",
    }
    """Where a block keeps a shared expert."""

    def architecture(self, config: Any) -> Architecture:
        """Pre-norm with a last norm."""
        query_norm = config.model_type == "qwen3_moe"
        return self.with_experts(self.gated(config, norm_place="pre", query_norm=query_norm), config)

    def with_experts(self, arch: Architecture, config: Any) -> Architecture:
        """The architecture with the experts of the config, if it has any."""
        experts = self.experts(config)
        return arch if experts is None else arch.replace(mlp="experts", experts=experts)

    def mask(self, config: Any) -> str:
        """Only Qwen 2's code reads the kinds of layers."""
        return masks(config) if config.model_type == "qwen2_moe" else sliding(config)

    def experts(self, config: Any) -> Experts | None:
        """What the config says of them; None where every layer is dense."""
        fields: dict[str, Any] = {"number": config.num_experts, "chosen": config.num_experts_per_tok}
        if config.model_type == "mixtral":
            return Experts(**fields, width=config.intermediate_size, renormalised=True)
        step = config.decoder_sparse_step
        dense = [
            layer
            for layer in range(config.num_hidden_layers)
            if layer in config.mlp_only_layers or not config.num_experts or (layer + 1) % step
        ]
        if len(dense) == config.num_hidden_layers:
            return None
        shared = hasattr(config, "shared_expert_intermediate_size")
        return Experts(
            **fields, width=config.moe_intermediate_size, renormalised=config.norm_topk_prob,
            shared_width=config.shared_expert_intermediate_size if shared else 0, shared_gate=shared,
            dense_layers=tuple(dense),
        )  # fmt: skip

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """An expert's two inward maps lie in one matrix, the gate first."""
        if not hasattr(block.mlp, "experts"):
            return super().layer(block, arch)
        norms = QUERY_NORMS if arch.query_norm else {}
        shares = any(name.startswith("shared") for name, _ in block.mlp.named_children())
        shared, experts = self.shared if shares else {}, block.mlp.experts
        gate, up = experts.gate_up_proj.chunk(2, 1)  # [expert, expert_width, width]
        return {
            **read_block(block, {**self.without("mlp.gate", "mlp.up", "mlp.down"), **norms, **shared}, arch),
            "experts.router.weight": block.mlp.gate.weight.T,
            "experts.gate.weight": gate.permute(2, 0, 1),
            "experts.up.weight": up.permute(2, 0, 1),
            "experts.down.weight": experts.down_proj.transpose(1, 2),
        }

    def prepare_for_float64(self, model: Any) -> Any:
        """Experts one by one, as transformers writes them down: its grouped kernels have no float64."""
        model.set_experts_implementation("eager")
        return model

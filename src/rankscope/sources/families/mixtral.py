"""Mixtral and its kin: Llama's blocks with a mixture of experts for an MLP."""

from typing import Any, ClassVar

from rankscope.errors import SourceError
from rankscope.nets import Architecture, Experts
from rankscope.sources.families.family import GainsFromOne
from rankscope.sources.families.llama import Llama
from rankscope.sources.families.parts import ModulePaths, Tensors, read_block, without
from rankscope.sources.families.rotary import masks, partly_rotary, sliding

MAPS = ("gate", "up", "down")


class Mixtral(Llama):
    """Mixtral, Qwen 2 MoE (a shared expert) and Qwen 3 MoE; some layers may have a dense MLP."""

    name = "mixtral"
    types: ClassVar[tuple[str, ...]] = ("mixtral", "qwen2_moe", "qwen3_moe")
    shared: ClassVar = {
        **{f"experts.shared.{name}": f"mlp.shared_expert.{name}_proj" for name in MAPS},
        "experts.shared_gate": "mlp.shared_expert_gate",
    }
    """Where a block keeps a shared expert."""
    reads: ClassVar = {  # only Qwen 2's code reads the kinds of layers
        **Llama.reads, "mask": lambda config: (masks if config.model_type == "qwen2_moe" else sliding)(config),
    }  # fmt: skip

    def architecture(self, config: Any) -> Architecture:
        """The architecture with the experts of the config, if it has any."""
        arch, experts = super().architecture(config), self.experts(config)
        return arch if experts is None else arch.replace(mlp="experts", experts=experts)

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
        shares = any(name.startswith("shared") for name, _ in block.mlp.named_children())
        shared, experts = self.shared if shares else {}, block.mlp.experts
        gate, up = experts.gate_up_proj.chunk(2, 1)  # [expert, expert_width, width]
        return {
            **read_block(block, {**without(self.parts, *(f"mlp.{name}" for name in MAPS)), **shared}, arch),
            "experts.router.weight": block.mlp.gate.weight.T,
            "experts.gate.weight": gate.permute(2, 0, 1),
            "experts.up.weight": up.permute(2, 0, 1),
            "experts.down.weight": experts.down_proj.transpose(1, 2),
        }

    def prepare_for_float64(self, model: Any) -> Any:
        """Experts one by one, as transformers writes them down: its grouped kernels have no float64."""
        model.set_experts_implementation("eager")
        return model


class Qwen3Next(GainsFromOne, Mixtral):
    """Qwen3-Next, whose query projection holds, head by head, the query and the gate. Gains are 1 + w."""

    name, types = "qwen3_next", ("qwen3_next",)
    parts: ClassVar[ModulePaths] = {
        **without(Mixtral.parts, "attention.query"),
        "attention.query | attention.gate": "self_attn.q_proj",
    }
    fixed: ClassVar = {**Mixtral.fixed, "mask": "causal", "query_norm": True, "head_gate": True}
    further = (partly_rotary,)

    def architecture(self, config: Any) -> Architecture:
        """Refused where some layers are recurrent."""
        linear = [kind for kind in config.layer_types if kind != "full_attention"]
        if linear:
            message = f"qwen3_next is mapped where every layer is full_attention; {len(linear)} of this config's are"
            raise SourceError(f"{message} {linear[0]}: watch measures it as it is", subject="layer_types")
        return super().architecture(config)


class GptOss(Mixtral):
    """gpt-oss: a number of each head takes a part of every row, which then sums to less than one."""

    name, types = "gpt_oss", ("gpt_oss",)
    parts: ClassVar[ModulePaths] = without(Mixtral.parts, *(f"mlp.{name}" for name in MAPS))
    fixed: ClassVar = {**Mixtral.fixed, "kernel": "sink", "activation": "quick_gelu"}
    reads: ClassVar = {**Mixtral.reads, "mask": masks}
    only: ClassVar = {"swiglu_alpha": 1.702}  # its gates are those of quick_gelu

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

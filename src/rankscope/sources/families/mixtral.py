"""Mixtral and its kin: Llama's blocks with a mixture of experts for an MLP. DeepSeek V2 and V3 have keys and values of
one latent, queries of another, each through a norm of its own."""

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rankscope.errors import SourceError
from rankscope.nets import Architecture, Experts
from rankscope.sources.families.family import refuse_others
from rankscope.sources.families.llama import Llama
from rankscope.sources.families.parts import ModulePaths, Tensors, dense, norm, read_block, scaled, without
from rankscope.sources.families.rotary import masks, partly_rotary, sliding

MAPS = ("gate", "up", "down")
DENSE = tuple(f"mlp.{name}" for name in MAPS)  # The parts of a layer without experts


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
        dense = [
            layer
            for layer in range(config.num_hidden_layers)
            if layer in config.mlp_only_layers or not config.num_experts or (layer + 1) % config.decoder_sparse_step
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
            **read_block(block, without(self.parts, *DENSE) | shared, arch, self.gain_at_zero),
            "experts.router.weight": block.mlp.gate.weight.T,
            "experts.gate.weight": gate.permute(2, 0, 1),
            "experts.up.weight": up.permute(2, 0, 1),
            "experts.down.weight": experts.down_proj.transpose(1, 2),
        }

    def prepare_for_float64(self, model: Any) -> Any:
        """Experts one by one, as transformers writes them down: its grouped kernels have no float64."""
        model.set_experts_implementation("eager")
        return model


class Qwen3Next(Mixtral):
    """Qwen3-Next, whose query projection holds, head by head, the query and the gate. Gains are 1 + w."""

    name, types, gain_at_zero = "qwen3_next", ("qwen3_next",), 1.0
    parts: ClassVar[ModulePaths] = {
        **without(Mixtral.parts, "attention.query"),
        "attention.query | attention.gate": "self_attn.q_proj",
    }
    fixed: ClassVar = {**Mixtral.fixed, "mask": "causal", "query_norm": True, "head_gate": True}
    further = (partly_rotary,)

    def architecture(self, config: Any) -> Architecture:
        """Mixtral's architecture; a config with recurrent layers raises `SourceError`."""
        linear = [kind for kind in config.layer_types if kind != "full_attention"]
        if linear:
            message = f"qwen3_next is mapped where every layer is full_attention; {len(linear)} of this config's are"
            raise SourceError(f"{message} {linear[0]}: watch measures it as it is", subject="layer_types")
        return super().architecture(config)


class GptOss(Mixtral):
    """gpt-oss: a number of each head takes a part of every row, which then sums to less than one."""

    name, types = "gpt_oss", ("gpt_oss",)
    parts: ClassVar[ModulePaths] = without(Mixtral.parts, *DENSE)
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


class DeepSeek(Mixtral):
    """V2 and V3, with experts that are chosen of all, or of the best groups; V3's by sigmoids and a correction.

    Of each head the rotated entries come first here, those of all heads the same for keys."""

    name = "deepseek"
    types: ClassVar[tuple[str, ...]] = ("deepseek_v2", "deepseek_v3")
    parts: ClassVar = without(Mixtral.parts, "attention.query", "attention.key", "attention.value")
    fixed: ClassVar = {**Mixtral.fixed, "mask": "causal"}
    reads: ClassVar = {
        "head_width": "qk_head_dim", "value_width": "v_head_dim", "key_latent": "kv_lora_rank",
        "norm_eps": "rms_norm_eps", "query_latent": lambda config: config.q_lora_rank or 0,
        "divisor": lambda config: math.sqrt(config.qk_head_dim) / _stretch(config) ** 2,
        "rotary_share": lambda config: config.qk_rope_head_dim / config.qk_head_dim,
        "rotary_pairs": lambda config: "adjacent" if getattr(config, "rope_interleave", True) else "half",
    }  # fmt: skip
    shared: ClassVar = {f"experts.shared.{name}": f"mlp.shared_experts.{name}_proj" for name in MAPS}

    def architecture(self, config: Any) -> Architecture:
        """Mixtral's architecture; a config with fewer heads of keys than of queries is refused."""
        refuse_others(config, num_key_value_heads=config.num_attention_heads)
        return super().architecture(config)

    def experts(self, config: Any) -> Experts | None:
        """The experts; None where every layer is dense."""
        first = config.first_k_dense_replace
        if first >= config.num_hidden_layers:
            return None
        third, ways = config.model_type == "deepseek_v3", ("greedy", "group_limited_greedy")
        if not third and (config.mlp_bias or config.topk_method not in ways):
            what = "biases" if config.mlp_bias else f"a choice of experts by {config.topk_method}"
            message = f"{config.model_type} is mapped with experts that have no biases, chosen by {' or '.join(ways)}"
            raise SourceError(f"{message}; this config has {what}: watch measures it as it is", subject="experts")
        width, grouped = config.moe_intermediate_size, third or config.topk_method != "greedy"
        groups: dict[str, Any] = {"groups": config.n_group, "groups_chosen": config.topk_group} if grouped else {}
        way: dict[str, Any] = {"sigmoid": True, "correction": True, "group_best": 2}
        return Experts(
            number=config.n_routed_experts, chosen=config.num_experts_per_tok, width=width,
            shared_width=width * config.n_shared_experts, dense_layers=tuple(range(first)),
            renormalised=third and bool(config.norm_topk_prob), **groups, **(way if third else {}),
        )  # fmt: skip

    def random_model(self, config: Any) -> Any:
        """With corrections of V3's scores, which no training moved, off zero."""
        model = super().random_model(config)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer += 0.3 * torch.rand_like(buffer)
        return model

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """Experts' outputs are scaled: so are their last matrices."""
        tensors, attention = super().layer(block, arch), block.self_attn
        if "experts.down.weight" in tensors:
            tensors = scaled(tensors, "experts.down", block.mlp.gate.routed_scaling_factor)
            if arch.experts is not None and arch.experts.correction:
                tensors["experts.correction"] = block.mlp.gate.e_score_correction_bias
        query = attention.q_proj if attention.q_a_proj is None else attention.q_b_proj
        if attention.q_a_proj is not None:
            tensors |= dense("attention.query_latent", attention.q_a_proj)
            tensors |= norm("attention.query_latent.norm", attention.q_a_layernorm)
        tensors |= dense("attention.key_latent", attention.kv_a_proj_with_mqa)
        tensors |= norm("attention.key_latent.norm", attention.kv_a_layernorm)
        turned = arch.rotary_width
        plain = arch.head_width - turned
        queries, latent = (_by_head(part.weight, arch.heads) for part in (query, attention.kv_b_proj))
        shared = torch.eye(turned, dtype=latent.dtype)[:, None].expand(-1, arch.heads, -1)
        keys = [F.pad(latent[..., :plain], (turned, 0)), F.pad(shared, (0, plain))]
        return tensors | {
            "attention.query.weight": torch.cat([queries[..., plain:], queries[..., :plain]], -1),
            "attention.value.weight": latent[..., plain:],
            "attention.key.weight": torch.cat(keys, 0),
        }


def _stretch(config: Any) -> float:
    """What transformers multiplies queries and keys by where positions are stretched."""
    rope = config.rope_parameters
    strength, factor = rope.get("mscale_all_dim", 0), rope.get("factor", 1.0)
    if rope["rope_type"] == "default" or not strength or factor <= 1:
        return 1.0
    return 0.1 * strength * math.log(factor) + 1.0


def _by_head(weight: Tensor, heads: int) -> Tensor:
    """`[inner, head, width]` of torch's `[head * width, inner]`."""
    return weight.reshape(heads, -1, weight.shape[1]).permute(2, 0, 1)

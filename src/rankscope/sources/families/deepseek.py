"""DeepSeek V2 and V3: keys and values of one latent, queries of another, each through a norm of its own."""

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rankscope.errors import SourceError
from rankscope.nets import Architecture, Experts
from rankscope.sources.families.family import refuse_others
from rankscope.sources.families.mixtral import Mixtral
from rankscope.sources.families.parts import Tensors, dense, norm, scaled, without


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
    shared: ClassVar = {f"experts.shared.{name}": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")}

    def architecture(self, config: Any) -> Architecture:
        """Refused with fewer heads of keys than of queries."""
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

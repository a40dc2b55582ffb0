"""GPT-2 and its kin: causal, pre-norm; positions, fused projections and parallel branches tell them apart."""

from typing import Any, ClassVar

import torch
from torch import nn

from rankscope.errors import SourceError, require_one_of
from rankscope.nets import Architecture
from rankscope.sources.families.family import CAUSAL, PRE, Family, usual_head_width
from rankscope.sources.families.parts import Tensors, layout, projections, scaled
from rankscope.sources.families.rotary import angles, partly_rotary, rotary


class GPT2(Family):
    """GPT-2, with its two scalings of scores folded into the queries."""

    name, types = "gpt2", ("gpt2",)
    stack, final_norm = "h", "ln_f"
    parts: ClassVar = layout("attn", "c_attn c_proj", norms="ln_1 ln_2", mlp="mlp.c_fc mlp.c_proj")
    embedding_parts: ClassVar = {"words": "wte", "positions": "wpe"}
    fixed: ClassVar = CAUSAL
    reads: ClassVar = {
        "mlp_width": lambda config: config.n_inner or 4 * config.n_embd,
        "activation": "activation_function", "norm_eps": "layer_norm_epsilon",
    }  # fmt: skip
    only: ClassVar = {"add_cross_attention": False}

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """A scaling of its own per layer goes into the query."""
        return scaled(super().layer(block, arch), "attention.query", block.attn.scaling * arch.divisor)

    def prepare_for_float64(self, model: Any) -> Any:
        """Attention upcast to float32 (Stanford's GPT-2) fails on scores in float64; without the upcast it is
        the usual one."""
        for block in model.h:
            block.attn.reorder_and_upcast_attn = False
        return model


def local_masks(config: Any) -> str:
    """GPT-Neo's mask of each layer; a local one sees its own token and those before it, a window of them."""
    known = {"global": "causal", "local": f"causal&window:{config.window_size - 1}"}
    for kind in config.attention_layers:
        require_one_of("kind of attention", kind, known, SourceError, "attention_types")
    return ";".join(known[kind] for kind in config.attention_layers)


GPTNeo = Family.like(
    "gpt_neo", "GPT-Neo: causal, pre-norm, with scores that are not divided.", types=("gpt_neo",), stack="h",
    final_norm="ln_f",
    parts=layout("attn.attention", "q_proj k_proj v_proj out_proj", norms="ln_1 ln_2", mlp="mlp.c_fc mlp.c_proj"),
    embedding_parts=GPT2.embedding_parts, fixed={**PRE, "divisor": 1.0},
    reads={
        **GPT2.reads, "mask": local_masks,
        "mlp_width": lambda config: config.intermediate_size or 4 * config.hidden_size,
    },
)  # fmt: skip


class GPTJ(Family):
    """GPT-J: causal, parallel branches that read through one norm, heads rotated in part."""

    name, types = "gptj", ("gptj",)
    stack, final_norm = "h", "ln_f"
    parts: ClassVar = layout("attn", "q_proj k_proj v_proj out_proj", norms="ln_1 ln_1", mlp="mlp.fc_in mlp.fc_out")
    embedding_parts: ClassVar = {"words": "wte"}
    fixed: ClassVar = {**CAUSAL, "parallel": True, "positions": "rotary", "rotary_pairs": "adjacent"}
    reads: ClassVar = {**GPT2.reads, "rotary_reach": "n_positions"}

    def architecture(self, config: Any) -> Architecture:
        """The architecture of a config, whose rotary angles have the base 10000 in every GPT-J."""
        width = usual_head_width(config)
        turned = config.rotary_dim or width
        return self.described(config, rotary_frequencies=(angles(10000, turned),), rotary_share=turned / width)

    def prepare_for_float64(self, model: Any) -> Any:
        """Sines and cosines are a table of float32 numbers: in float64, of the same angles."""
        for block in model.h:
            attention = block.attn
            frequency = torch.tensor(angles(10000, attention.pos_embd_dim), dtype=torch.float64)
            angle = torch.arange(attention.max_positions, dtype=torch.float64)[:, None] * frequency
            attention.embed_positions = torch.cat([angle.sin(), angle.cos()], 1)
        return model


GPTNeoX = Family.like(
    "gpt_neox", "GPT-NeoX with parallel or serial branches.", types=("gpt_neox",), stack="layers",
    final_norm="final_layer_norm",
    parts=layout(
        "attention", "query_key_value dense", norms="input_layernorm post_attention_layernorm",
        mlp="mlp.dense_h_to_4h mlp.dense_4h_to_h", joined=" | ",
    ),
    embedding_parts={"words": "embed_in"}, fixed=CAUSAL, reads={"parallel": "use_parallel_residual"},
    further=(partly_rotary,),
)  # fmt: skip


class Bloom(Family):
    """BLOOM: causal, pre-norm, with scores that fall with distance.

    Its code has `sqrt(2 / pi)` in its gelu to eight digits, and is compared with all of them."""

    name, types = "bloom", ("bloom",)
    stack, final_norm = "h", "ln_f"
    parts: ClassVar = {**GPTNeoX.parts, **projections("self_attention", "query_key_value dense", joined=" | ")}
    embedding_parts: ClassVar = {"words": "word_embeddings", "norm": "word_embeddings_layernorm"}
    fixed: ClassVar = {**CAUSAL, "positions": "alibi", "activation": "gelu_new"}
    reads: ClassVar = {"norm_eps": "layer_norm_epsilon", "mlp_width": lambda config: 4 * config.hidden_size}
    only: ClassVar = {"apply_residual_connection_post_layernorm": False}

    def prepare_for_float64(self, model: Any) -> Any:
        """A gelu of its own, without the eight digits."""
        for block in model.h:
            block.mlp.gelu_impl = nn.GELU("tanh")
        return model


class Falcon(Family):
    """Falcon with rotary positions: one or two norms before parallel branches, or serial ones."""

    name, types = "falcon", ("falcon",)
    stack, final_norm = "h", "ln_f"
    parts: ClassVar = {
        "attention.output": "self_attention.dense",
        "attention_norm": "ln_attn or input_layernorm",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
        "mlp_norm": "ln_mlp or post_attention_layernorm or input_layernorm",
    }
    embedding_parts: ClassVar = {"words": "word_embeddings"}
    fixed: ClassVar = CAUSAL
    reads: ClassVar = {
        "mlp_width": "ffn_hidden_size", "activation": "activation", "norm_eps": "layer_norm_epsilon",
        "parallel": "parallel_attn", "key_heads": lambda config:
            config.num_kv_heads if config.new_decoder_architecture or not config.multi_query else 1,
    }  # fmt: skip
    further = (rotary,)
    only: ClassVar = {"alibi": False}

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """Fused by group: its queries, its key, its value."""
        tensors = super().layer(block, arch)
        for kind, fused in block.self_attention.query_key_value.named_parameters():
            by_group = fused.unflatten(0, (arch.key_heads, -1, arch.head_width))
            parts = {"query": by_group[:, :-2].flatten(0, 1), "key": by_group[:, -2], "value": by_group[:, -1]}
            for name, part in parts.items():
                tensors[f"attention.{name}.{kind}"] = part if kind == "bias" else part.permute(2, 0, 1)
        return tensors

    def prepare_for_float64(self, model: Any) -> Any:
        """Eager attention, to which transformers does not switch it: with another, its code gives patterns of tokens
        that see what comes after them."""
        model.config._attn_implementation = "eager"
        return model


Phi = Family.like(
    "phi", "Phi 1, 1.5 and 2, whose heads are rotated in part.", types=("phi",), stack="layers",
    final_norm="final_layernorm",
    parts=layout(
        "self_attn", "q_proj k_proj v_proj dense", norms="input_layernorm input_layernorm", mlp="mlp.fc1 mlp.fc2",
    ),
    embedding_parts={"words": "embed_tokens"}, fixed={**CAUSAL, "parallel": True},
    reads={"key_heads": "num_key_value_heads"}, further=(partly_rotary,), only={"qk_layernorm": False},
)  # fmt: skip

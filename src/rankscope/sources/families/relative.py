"""T5, DeBERTa and XLNet, whose scores know how far apart two tokens are: by a learned bias (T5, whose decoder
attends to what its encoder gives), or by products of queries and keys with relative positions."""

import copy
from importlib import import_module
from typing import Any, ClassVar

import torch

from rankscope.nets import Architecture, Linear
from rankscope.sources.families.bert import Bert
from rankscope.sources.families.family import PRE, Family, refuse_others
from rankscope.sources.families.parts import ModulePaths, Tensors, heads_in, projections, without


def mlp_in(place: str) -> ModulePaths:
    """Paths of the MLP, whose first maps have other names where it is gated, and of its norm."""
    inner = f"{place}.DenseReluDense"
    return {
        "mlp.gate": f"{inner}.wi_0 or none", "mlp.up": f"{inner}.wi_1 or {inner}.wi", "mlp.down": f"{inner}.wo",
        "mlp_norm": f"{place}.layer_norm",
    }  # fmt: skip


class T5(Family):
    """T5 and T5 1.1 (gated), the encoder, which has a class of its own."""

    name, types = "t5", ("t5",)
    loader, inside = "T5EncoderModel", "encoder"
    stack, final_norm = "block", "final_layer_norm"
    parts: ClassVar = {
        **projections("layer.0.SelfAttention", "q k v o"), "attention_norm": "layer.0.layer_norm", **mlp_in("layer.1")
    }  # fmt: skip
    embedding_parts: ClassVar = {"words": "embed_tokens"}
    fixed: ClassVar = {**PRE, "divisor": 1.0, "positions": "bias", "norm": "rms"}
    reads: ClassVar = {
        "head_width": "d_kv", "mlp_width": "d_ff", "activation": "dense_act_fn", "norm_eps": "layer_norm_epsilon",
        "bias_buckets": "relative_attention_num_buckets", "bias_reach": "relative_attention_max_distance",
        "mlp": lambda config: "gated" if config.is_gated_act else "plain",
    }  # fmt: skip
    only: ClassVar = {"is_decoder": False}

    def other_tensors(self, model: Any) -> Tensors:
        """The last norm, and the table of biases, which the first block keeps for all."""
        table = model.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        return {**super().other_tensors(model), "bias_table": table}


class T5Decoder(T5):
    """The decoder, its MLP one place further on."""

    name, side, inside = "t5_decoder", "decoder", "decoder"
    loader = "T5Model"
    parts: ClassVar = {
        **T5.parts, **mlp_in("layer.2"),
        **projections("layer.1.EncDecAttention", "q k v o", "cross"), "cross_norm": "layer.1.layer_norm",
    }  # fmt: skip

    def architecture(self, config: Any) -> Architecture:
        """As the encoder's, with tokens behind alone, and a memory."""
        encoder = copy.copy(config)
        if not config.is_decoder:  # the config of both sides
            encoder.num_layers = config.num_decoder_layers
        encoder.is_decoder = False
        return super().architecture(encoder).replace(mask="causal", bias_ahead=False, cross_attention=True)


MT5 = T5.like("mt5", "The encoder of mT5: T5's blocks under another name.", types=("mt5",), loader="MT5EncoderModel")
MT5Decoder = T5Decoder.like(
    "mt5_decoder", "The decoder of mT5: T5's blocks under another name.", types=("mt5",), loader="MT5Model"
)


class DebertaV2(Family):
    """DeBERTa v2 without its convolution, and v3."""

    name, types, stack = "deberta_v2", ("deberta-v2",), Bert.stack
    parts: ClassVar = {
        **Bert.parts,
        **projections("attention", "self.query_proj self.key_proj self.value_proj output.dense"),
    }
    embedding_parts = Bert.embedding_parts
    only: ClassVar = {"conv_kernel_size": 0}

    def architecture(self, config: Any) -> Architecture:
        """Post-norm, with the divisor of its own code."""
        refuse_others(config, **self.only, embedding_size=config.hidden_size)
        width = getattr(config, "attention_head_size", config.hidden_size // config.num_attention_heads)
        terms = 1 + len({"c2p", "p2c"} & {*(config.pos_att_type or ())})
        fields: dict[str, Any] = {"head_width": width, "divisor": self.divisor(width, terms)}
        if config.relative_attention:
            reach = config.max_relative_positions
            reach = config.max_position_embeddings if reach < 1 else reach
            buckets = getattr(config, "position_buckets", -1)
            sizes = (buckets, reach) if buckets > 0 else (reach, 1)
            fields |= {"positions": "disentangled", "bias_buckets": sizes[0], "bias_reach": sizes[1]}
        return self.described(config, **fields)

    def divisor(self, width: int, terms: int) -> float:
        """What scores are divided by. transformers 5.22 compiles the function for it, which is float32 whatever the
        dtype; that of 5.23 can be lifted to float64 (`parity.py`)."""
        code = import_module(f"transformers.models.{self.name}.modeling_{self.name}")
        compiled = isinstance(code.scaled_size_sqrt, torch.jit.ScriptFunction)
        size = torch.tensor(float(width * terms), dtype=torch.float32 if compiled else torch.float64)
        return float(size.sqrt())

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """Positions are projected by maps of their own, or by those of queries and keys; a term that is not there
        is zero."""
        tensors, attention = super().layer(block, arch), block.attention.self
        if arch.positions != "disentangled":
            return tensors
        for name, term in (("query", "p2c"), ("key", "c2p")):
            linear = getattr(attention, f"{name}_proj" if attention.share_att_key else f"pos_{name}_proj", None)
            present = term in attention.pos_att_type
            part = heads_in(f"attention.relative_{name}", linear if present else attention.query_proj, arch.heads)
            tensors |= part if present else {key: torch.zeros_like(tensor) for key, tensor in part.items()}
        return tensors

    def other_tensors(self, model: Any) -> Tensors:
        """The table of relative positions, through its norm where it has one."""
        table = model.encoder.get_rel_embedding()
        return {} if table is None else {"relative_table": table}


class Deberta(DebertaV2):
    """DeBERTa (v1), whose queries and values have biases beside their matrix, and keys none."""

    name, types = "deberta", ("deberta",)
    parts: ClassVar = {
        **without(Bert.parts, "attention.query", "attention.key", "attention.value"),
        **projections("attention", "self.in_proj output.dense", joined=" | "),
    }
    only: ClassVar = {"talking_head": False, **DebertaV2.only}

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """Positions are projected by maps of their own; a term that is not there is zero."""
        tensors, attention = super(DebertaV2, self).layer(block, arch), block.attention.self
        for name, bias in (("query", attention.q_bias), ("value", attention.v_bias)):
            tensors[f"attention.{name}.bias"] = bias.reshape(arch.heads, -1)
        if arch.positions == "disentangled":
            width = attention.in_proj.in_features
            none = Linear(attention.q_bias.new_zeros(width, width))
            keys = attention.pos_proj if "c2p" in attention.pos_att_type else none
            queries = attention.pos_q_proj if "p2c" in attention.pos_att_type else none
            tensors |= heads_in("attention.relative_key", keys, arch.heads)
            tensors |= heads_in("attention.relative_query", queries, arch.heads)
            tensors.setdefault("attention.relative_query.bias", torch.zeros_like(tensors["attention.query.bias"]))
        return tensors


class XLNet(Family):
    """XLNet reading a whole sequence: one stream, no memory, no segments."""

    name, types = "xlnet", ("xlnet",)
    tokens_first = True
    stack = "layer"
    parts: ClassVar = {
        "attention_norm": "rel_attn.layer_norm",
        "mlp.up": "ff.layer_1",
        "mlp.down": "ff.layer_2",
        "mlp_norm": "ff.layer_norm",
    }
    embedding_parts: ClassVar = {"words": "word_embedding"}
    fixed: ClassVar = {"positions": "relative"}
    reads: ClassVar = {"head_width": "d_head", "mlp_width": "d_inner", "activation": "ff_activation"}
    only: ClassVar = {"attn_type": "bi", "bi_data": False, "clamp_len": -1, "same_length": False}

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """Projections are kept by head already; r projects positions, r_w and r_r are u and v."""
        attention = block.rel_attn
        return {
            **super().layer(block, arch),
            "attention.query.weight": attention.q,
            "attention.key.weight": attention.k,
            "attention.value.weight": attention.v,
            "attention.output.weight": attention.o.permute(1, 2, 0),
            "attention.position": attention.r,
            "attention.content_bias": attention.r_w_bias,
            "attention.position_bias": attention.r_r_bias,
        }

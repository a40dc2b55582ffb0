"""T5's encoder, and its decoder, whose blocks attend to what the encoder gives: RMSNorm before, a learned
bias on scores by distance, no divisor."""

import copy
from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.families.family import PRE, Family
from rankscope.sources.families.parts import ModulePaths, Tensors, projections


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


class MT5(T5):
    """The encoder of mT5: T5's blocks under another name."""

    name, types, loader = "mt5", ("mt5",), "MT5EncoderModel"


class MT5Decoder(T5Decoder):
    """The decoder of mT5: T5's blocks under another name."""

    name, types, loader = "mt5_decoder", ("mt5",), "MT5Model"

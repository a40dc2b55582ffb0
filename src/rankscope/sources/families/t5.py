"""T5's encoder, and its decoder, whose blocks attend to what the encoder gives: RMSNorm before, a learned
bias on scores by distance, no divisor."""

import copy
from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.families.family import Family, Tensors, architecture_from, projections, read_block, require

PLAIN = {"mlp.up": "layer.1.DenseReluDense.wi"}
GATED = {"mlp.gate": "layer.1.DenseReluDense.wi_0", "mlp.up": "layer.1.DenseReluDense.wi_1"}


class T5(Family):
    """T5 and T5 1.1 (gated), the encoder, which has a class of its own."""

    name, types = "t5", ("t5",)
    loader, inside = "T5EncoderModel", "encoder"
    stack, final_norm = "block", "final_layer_norm"
    parts: ClassVar = {
        **projections("layer.0.SelfAttention", "q k v o"),
        "attention_norm": "layer.0.layer_norm",
        "mlp.down": "layer.1.DenseReluDense.wo",
        "mlp_norm": "layer.1.layer_norm",
    }
    embedding_parts: ClassVar = {"words": "embed_tokens"}

    def architecture(self, config: Any) -> Architecture:
        """Pre-norm with a last norm."""
        require(config, is_decoder=False)
        return architecture_from(
            config, head_width=config.d_kv, divisor=1.0, positions="bias",
            bias_buckets=config.relative_attention_num_buckets,
            bias_reach=config.relative_attention_max_distance,
            mlp="gated" if config.is_gated_act else "plain", mlp_width=config.d_ff,
            activation=config.dense_act_fn, norm="rms", norm_place="pre",
            norm_eps=config.layer_norm_epsilon, final_norm=True,
        )  # fmt: skip

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """The MLP's first maps have other names where it is gated; in a decoder's block it comes third."""
        paths = {**self.parts, **(GATED if arch.mlp == "gated" else PLAIN)}
        if self.side == "decoder":
            mlp = {name: path for name, path in paths.items() if name.startswith("mlp")}
            paths |= {name: path.replace("layer.1", "layer.2") for name, path in mlp.items()}
        return read_block(block, paths, arch)

    def other_tensors(self, model: Any) -> Tensors:
        """The last norm, and the table of biases, which the first block keeps for all."""
        table = model.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        return {**super().other_tensors(model), "bias_table": table}


class T5Decoder(T5):
    """The decoder, its MLP one place further on."""

    name, side, inside = "t5_decoder", "decoder", "decoder"
    loader = "T5Model"
    parts: ClassVar = {
        **T5.parts,
        **projections("layer.1.EncDecAttention", "q k v o", "cross"),
        "cross_norm": "layer.1.layer_norm",
    }

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

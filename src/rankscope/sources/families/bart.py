"""BART and its kin: an encoder, and a decoder that attends to its output; OPT is a decoder alone, Whisper's encoder and
wav2vec 2.0 read sound."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.embedding import Embedding, SoundEmbedding, WaveEmbedding
from rankscope.sources.families.family import PRE, Family, activation, after_padding
from rankscope.sources.families.parts import (
    Tensors,
    convolution,
    layout,
    linear_weights,
    norm,
    norm_weights,
    projections,
    without,
)


class Bart(Family):
    """BART's encoder: post-norm, learned positions."""

    name = "bart"
    types: ClassVar[tuple[str, ...]] = ("bart",)
    side = inside = "encoder"
    stack = "layers"
    parts: ClassVar = layout(
        "self_attn", "q_proj k_proj v_proj out_proj", norms="self_attn_layer_norm final_layer_norm", mlp="fc1 fc2"
    )
    embedding_parts: ClassVar = {
        "words": "embed_tokens", "positions": "embed_positions", "norm": "layernorm_embedding",
        "scale": "embed_tokens.embed_scale",
    }  # fmt: skip
    counts_padding = True
    fixed: ClassVar = {"norm_eps": 1e-5}  # of torch's LayerNorm
    reads: ClassVar = {"width": "d_model", "activation": "activation_function"}

    def architecture(self, config: Any) -> Architecture:
        """The architecture of the encoder or decoder; a decoder is causal, and reads what the encoder gives."""
        fields = {"layers": "layers", "heads": "attention_heads", "mlp_width": "ffn_dim"}
        of_side = {ours: getattr(config, f"{self.side}_{theirs}") for ours, theirs in fields.items()}
        decodes = {"mask": "causal", "cross_attention": True} if self.side == "decoder" else {}
        return self.described(config, **of_side, **decodes)

    def first_position(self, model: Any) -> int:
        """Positions start at row 2 of the table."""
        return int(model.embed_positions.offset)


DECODER: dict[str, Any] = {
    "side": "decoder", "inside": "decoder",
    "parts": {
        **Bart.parts,
        **projections("encoder_attn", "q_proj k_proj v_proj out_proj", "cross"),
        "cross_norm": "encoder_attn_layer_norm",
    },
}  # fmt: skip
"""Where a decoder differs from its encoder."""
TABLES = {"words": "embed_tokens", "positions": "embed_positions"}
SINUSOIDAL: dict[str, Any] = {
    "embedding_parts": {**TABLES, "scale": "embed_scale"}, "first_position": Family.first_position,
    "computed": ("embed_positions.weight",),
}  # fmt: skip
"""Positions without a norm after them, which files may lack."""

BartDecoder = Bart.like("bart_decoder", "BART's decoder: causal, with cross-attention.", **DECODER)
Marian = Bart.like("marian", "Marian's encoder: post-norm, sinusoidal positions.", types=("marian",), **SINUSOIDAL)
MarianDecoder = Marian.like("marian_decoder", "Marian's decoder: causal, with cross-attention.", **DECODER)
MBart = Bart.like(
    "mbart", "mBART's encoder: a BART encoder with norms before its branches and a last one.",
    types=("mbart",), final_norm="layer_norm", fixed={**PRE, **Bart.fixed},
)  # fmt: skip
MBartDecoder = MBart.like("mbart_decoder", "mBART's decoder: causal, with cross-attention.", **DECODER)
Pegasus = MBart.like("pegasus", "PEGASUS's encoder: pre-norm, sinusoidal positions.", types=("pegasus",), **SINUSOIDAL)
PegasusDecoder = Pegasus.like("pegasus_decoder", "PEGASUS's decoder: causal, with cross-attention.", **DECODER)
M2M100 = MBart.like(
    "m2m_100", "The encoder of M2M-100 and NLLB: pre-norm, sinusoidal positions that count tokens alone.",
    types=("m2m_100",), counts_padding=False, first_position=after_padding,
    embedding_parts=without(Bart.embedding_parts, "norm") | {"positions": "embed_positions.weights"},
)  # fmt: skip
M2M100Decoder = M2M100.like(
    "m2m_100_decoder", "The decoder of M2M-100 and NLLB: causal, with cross-attention.", **DECODER
)


class Whisper(Bart):
    """Whisper's encoder of mel spectra."""

    name, types, final_norm = "whisper", ("whisper",), "layer_norm"
    fixed: ClassVar = {**PRE, **Bart.fixed}
    continuous_inputs, input_name = True, "input_features"

    def embedding(self, model: Any) -> Embedding:
        """Two convolutions of a mel spectrum, and positions."""
        positions = model.embed_positions.weight.detach()
        return SoundEmbedding(convolution(model.conv1), convolution(model.conv2), positions)


WhisperDecoder = MBart.like(
    "whisper_decoder", "Whisper's decoder: causal, with cross-attention.", types=("whisper",), **DECODER,
    embedding_parts=TABLES, counts_padding=False, first_position=Family.first_position,
)  # fmt: skip


class OPT(Bart):
    """OPT: causal, with learned positions."""

    name, types = "opt", ("opt",)
    side, inside, final_norm, counts_padding = "", "decoder", "final_layer_norm", False
    embedding_parts: ClassVar = {**TABLES, "before": "project_in"}
    fixed: ClassVar = {"mask": "causal", **Bart.fixed}
    reads: ClassVar = {
        "mlp_width": "ffn_dim", "activation": "activation_function",
        "norm_place": lambda config: "pre" if config.do_layer_norm_before else "post",
        "final_norm": lambda config: config.do_layer_norm_before and not config._remove_final_layer_norm,
    }  # fmt: skip
    architecture = Family.architecture

    def output(self, model: Any) -> bool:
        """A narrow embedding comes with a projection back to it."""
        return model.project_out is None


class Wav2Vec2(Family):
    """wav2vec 2.0 and HuBERT, post-norm or (the large ones) pre-norm, on samples of sound without padding."""

    name, types = "wav2vec2", ("wav2vec2", "hubert")
    continuous_inputs, input_name, stack = True, "input_values", "encoder.layers"
    parts: ClassVar = layout(
        "attention", "q_proj k_proj v_proj out_proj", norms="layer_norm final_layer_norm",
        mlp="feed_forward.intermediate_dense feed_forward.output_dense",
    )  # fmt: skip
    reads: ClassVar = {
        "norm_place": lambda config: "pre" if config.do_stable_layer_norm else "post",
        "final_norm": "do_stable_layer_norm",
    }
    only: ClassVar = {"adapter_attn_dim": None, "conv_pos_batch_norm": False}

    def other_tensors(self, model: Any) -> Tensors:
        """The encoder's norm, where it comes last."""
        return norm("final_norm", model.encoder.layer_norm) if model.config.do_stable_layer_norm else {}

    def embedding(self, model: Any) -> Embedding:
        """All before the first block; the encoder's norm too, where it comes first."""
        config, layers, project = model.config, model.feature_extractor.conv_layers, model.feature_projection
        into: Any = linear_weights(project.projection)
        return WaveEmbedding(
            convolutions=tuple(convolution(layer.conv) for layer in layers),
            norms=tuple(norm_weights(getattr(layer, "layer_norm", None)) for layer in layers),
            by_channel=config.feat_extract_norm == "group",
            activation=activation(config.feat_extract_activation),
            into_norm=norm_weights(getattr(project, "layer_norm", None)),
            into=into,
            position_convolution=convolution(model.encoder.pos_conv_embed.conv),
            norm=None if config.do_stable_layer_norm else norm_weights(model.encoder.layer_norm),
            norm_eps=config.layer_norm_eps,
        )

    def output(self, model: Any) -> bool:
        """An adapter may shorten what comes out."""
        return getattr(model, "adapter", None) is None

"""BART and its kin, Whisper and OPT among them: an encoder, and a decoder that attends to its output."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.embedding import Embedding, SoundEmbedding
from rankscope.sources.families.family import PRE, Family, after_padding
from rankscope.sources.families.parts import convolution, layout, projections


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
        """What configs say of each side by itself; a decoder sees what lies behind, and what the encoder gives."""
        fields = {"layers": "layers", "heads": "attention_heads", "mlp_width": "ffn_dim"}
        of_side = {ours: getattr(config, f"{self.side}_{theirs}") for ours, theirs in fields.items()}
        decodes = {"mask": "causal", "cross_attention": True} if self.side == "decoder" else {}
        return self.described(config, **of_side, **decodes)

    def first_position(self, model: Any) -> int:
        """Positions start at row 2 of the table."""
        return int(model.embed_positions.offset)


class BartDecoder(Bart):
    """BART's decoder: causal, with cross-attention."""

    name, side, inside = "bart_decoder", "decoder", "decoder"
    parts: ClassVar = {
        **Bart.parts,
        **projections("encoder_attn", "q_proj k_proj v_proj out_proj", "cross"),
        "cross_norm": "encoder_attn_layer_norm",
    }


class Marian(Bart):
    """Marian's encoder: post-norm, sinusoidal positions."""

    name, types = "marian", ("marian",)
    computed = ("embed_positions.weight",)
    embedding_parts: ClassVar = {"words": "embed_tokens", "positions": "embed_positions", "scale": "embed_scale"}
    first_position = Family.first_position


class MarianDecoder(BartDecoder, Marian):
    """Marian's decoder: causal, with cross-attention."""

    name = "marian_decoder"


class MBart(Bart):
    """mBART's encoder: a BART encoder with norms before its branches and a last one."""

    name, types = "mbart", ("mbart",)
    final_norm = "layer_norm"
    fixed: ClassVar = {**PRE, **Bart.fixed}


class MBartDecoder(BartDecoder, MBart):
    """mBART's decoder: causal, with cross-attention."""

    name = "mbart_decoder"


class Pegasus(MBart):
    """PEGASUS's encoder: pre-norm, sinusoidal positions."""

    name, types, computed = "pegasus", ("pegasus",), Marian.computed
    embedding_parts, first_position = Marian.embedding_parts, Marian.first_position


class PegasusDecoder(BartDecoder, Pegasus):
    """PEGASUS's decoder: causal, with cross-attention."""

    name = "pegasus_decoder"


class M2M100(MBart):
    """The encoder of M2M-100 and NLLB: pre-norm, sinusoidal positions that count tokens alone."""

    name, types, counts_padding = "m2m_100", ("m2m_100",), False
    embedding_parts: ClassVar = {**Bart.embedding_parts, "positions": "embed_positions.weights", "norm": "none"}
    first_position = after_padding


class M2M100Decoder(BartDecoder, M2M100):
    """The decoder of M2M-100 and NLLB: causal, with cross-attention."""

    name = "m2m_100_decoder"


class Whisper(MBart):
    """Whisper's encoder of mel spectra."""

    name, types = "whisper", ("whisper",)
    continuous_inputs, input_name = True, "input_features"

    def embedding(self, model: Any) -> Embedding:
        """Two convolutions of a mel spectrum, and positions."""
        positions = model.embed_positions.weight.detach()
        return SoundEmbedding(convolution(model.conv1), convolution(model.conv2), positions)


class WhisperDecoder(BartDecoder, Whisper):
    """Whisper's decoder: causal, with cross-attention."""

    name, continuous_inputs, counts_padding = "whisper_decoder", False, False
    embedding_parts: ClassVar = {"words": "embed_tokens", "positions": "embed_positions"}
    embedding, first_position = Family.embedding, Family.first_position


class OPT(Bart):
    """OPT: causal, with learned positions."""

    name, types = "opt", ("opt",)
    side, inside, final_norm, counts_padding = "", "decoder", "final_layer_norm", False
    embedding_parts: ClassVar = {"words": "embed_tokens", "positions": "embed_positions", "before": "project_in"}
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

"""BART and its kin: an encoder, and a decoder that attends to its output."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.embedding import Embedding
from rankscope.sources.families.family import Family, architecture_from, layout, projections

CROSS = {
    **projections("encoder_attn", "q_proj k_proj v_proj out_proj", "cross"),
    "cross_norm": "encoder_attn_layer_norm",
}


class Bart(Family):
    """BART's encoder: post-norm, learned positions."""

    name = "bart"
    types: ClassVar[tuple[str, ...]] = ("bart",)
    side = inside = "encoder"
    stack = "layers"
    parts: ClassVar = layout(
        "self_attn", "q_proj k_proj v_proj out_proj", norms="self_attn_layer_norm final_layer_norm", mlp="fc1 fc2"
    )
    embedding_parts: ClassVar = {"words": "embed_tokens", "positions": "embed_positions", "norm": "layernorm_embedding"}

    def architecture(self, config: Any) -> Architecture:
        """Post-norm, with the eps of torch's LayerNorm."""
        return architecture_from(config, **self.sizes(config), norm_eps=1e-5)

    def sizes(self, config: Any) -> dict[str, Any]:
        """What configs say of each side by itself."""
        decodes = {"mask": "causal", "cross_attention": True} if self.side == "decoder" else {}
        return {
            "width": config.d_model,
            "layers": getattr(config, f"{self.side}_layers"),
            "heads": getattr(config, f"{self.side}_attention_heads"),
            "mlp_width": getattr(config, f"{self.side}_ffn_dim"),
            "activation": config.activation_function,
            **decodes,
        }

    def embedding(self, model: Any) -> Embedding:
        """Words may be scaled; positions count padding too."""
        return self.text(model, scale=model.embed_tokens.embed_scale, by_column=True)

    def first_position(self, model: Any) -> int:
        """Positions start at row 2 of the table."""
        return int(model.embed_positions.offset)


class BartDecoder(Bart):
    """BART's decoder: causal, with cross-attention."""

    name, side, inside = "bart_decoder", "decoder", "decoder"
    parts: ClassVar = {**Bart.parts, **CROSS}


class Marian(Bart):
    """Marian's encoder: post-norm, sinusoidal positions."""

    name, types = "marian", ("marian",)
    computed = ("embed_positions.weight",)
    embedding_parts: ClassVar = {"words": "embed_tokens", "positions": "embed_positions"}

    def embedding(self, model: Any) -> Embedding:
        """Words may be scaled; positions count padding too."""
        return self.text(model, scale=model.embed_scale, by_column=True)

    def first_position(self, model: Any) -> int:
        """Positions start at row 0 of the table."""
        return 0


class MarianDecoder(Marian):
    """Marian's decoder: causal, with cross-attention."""

    name, side, inside = "marian_decoder", "decoder", "decoder"
    parts = BartDecoder.parts


class MBart(Bart):
    """mBART's encoder: a BART encoder with norms before its branches and a last one."""

    name, types = "mbart", ("mbart",)
    final_norm = "layer_norm"

    def architecture(self, config: Any) -> Architecture:
        """Pre-norm with a last norm, and the eps of torch's LayerNorm."""
        return super().architecture(config).replace(norm_place="pre", final_norm=True)


class MBartDecoder(MBart):
    """mBART's decoder: causal, with cross-attention."""

    name, side, inside = "mbart_decoder", "decoder", "decoder"
    parts = BartDecoder.parts


class Pegasus(MBart):
    """PEGASUS's encoder: pre-norm, sinusoidal positions."""

    name, types, computed = "pegasus", ("pegasus",), Marian.computed
    embedding_parts = Marian.embedding_parts
    embedding, first_position = Marian.embedding, Marian.first_position


class PegasusDecoder(Pegasus):
    """PEGASUS's decoder: causal, with cross-attention."""

    name, side, inside = "pegasus_decoder", "decoder", "decoder"
    parts = BartDecoder.parts


class M2M100(MBart):
    """The encoder of M2M-100 and NLLB: pre-norm, sinusoidal positions that count tokens alone."""

    name, types = "m2m_100", ("m2m_100",)
    embedding_parts: ClassVar = {"words": "embed_tokens"}

    def embedding(self, model: Any) -> Embedding:
        """Words may be scaled; rows of the table up to the padding id are not used."""
        positions = model.embed_positions.weights[model.padding_idx + 1 :]
        return self.text(model, scale=model.embed_tokens.embed_scale, positions=positions)

    def first_position(self, model: Any) -> int:
        """Positions start after the padding id."""
        return int(model.padding_idx) + 1


class M2M100Decoder(M2M100):
    """The decoder of M2M-100 and NLLB: causal, with cross-attention."""

    name, side, inside = "m2m_100_decoder", "decoder", "decoder"
    parts = BartDecoder.parts

"""BART, OPT and Whisper, whose blocks are laid out alike: encoders, and decoders that may attend to their output."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.embedding import Embedding, SoundEmbedding, TextEmbedding
from rankscope.sources.families.family import (
    Family,
    architecture_from,
    convolution,
    layout,
    linear_weights,
    projections,
)

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


class OPT(Bart):
    """OPT: causal, with learned positions."""

    name, types = "opt", ("opt",)
    side, inside, final_norm = "", "decoder", "final_layer_norm"
    embedding_parts: ClassVar = {"words": "embed_tokens", "positions": "embed_positions"}

    def architecture(self, config: Any) -> Architecture:
        """Pre- or post-norm, with the eps of torch's LayerNorm."""
        return architecture_from(
            config, mlp_width=config.ffn_dim, activation=config.activation_function,
            mask="causal", norm_place="pre" if config.do_layer_norm_before else "post", norm_eps=1e-5,
            final_norm=config.do_layer_norm_before and not config._remove_final_layer_norm,
        )  # fmt: skip

    def output(self, model: Any) -> bool:
        """A narrow embedding comes with a projection back to it."""
        return model.project_out is None

    def embedding(self, model: Any) -> TextEmbedding:
        """Words, widened where they are narrow, and positions."""
        into = model.project_in
        return self.text(model, before=None if into is None else linear_weights(into))


class Whisper(Bart):
    """Whisper's encoder of mel spectra."""

    name, types = "whisper", ("whisper",)
    continuous_inputs, input_name, final_norm = True, "input_features", "layer_norm"

    def architecture(self, config: Any) -> Architecture:
        """Pre-norm with a last norm, torch's usual eps."""
        return architecture_from(config, **self.sizes(config), norm_place="pre", norm_eps=1e-5, final_norm=True)

    def embedding(self, model: Any) -> Embedding:
        """Two convolutions of a mel spectrum, and positions."""
        positions = model.embed_positions.weight.detach()
        return SoundEmbedding(convolution(model.conv1), convolution(model.conv2), positions)


class WhisperDecoder(Whisper):
    """Whisper's decoder: causal, with cross-attention."""

    name, side, inside = "whisper_decoder", "decoder", "decoder"
    continuous_inputs = False
    parts = BartDecoder.parts
    embedding_parts: ClassVar = {"words": "embed_tokens", "positions": "embed_positions"}

    def embedding(self, model: Any) -> Embedding:
        """The sum of words and positions."""
        return self.text(model)

    def first_position(self, model: Any) -> int:
        """Positions start at row 0 of the table."""
        return 0

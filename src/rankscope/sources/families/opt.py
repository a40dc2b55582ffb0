"""OPT: a causal decoder, pre-norm but for the 350M model, which is post-norm with a narrow embedding."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.embedding import TextEmbedding
from rankscope.sources.families.bart import Bart
from rankscope.sources.families.family import Family, activation, architecture_from, linear_weights


class OPT(Family):
    """OPT: causal, with learned positions."""

    name, types = "opt", ("opt",)
    stack, final_norm, inside = "layers", "final_layer_norm", "decoder"
    parts = Bart.parts
    embedding_parts: ClassVar = {"words": "embed_tokens", "positions": "embed_positions"}

    def architecture(self, config: Any) -> Architecture:
        """Pre- or post-norm, with the eps of torch's LayerNorm."""
        return architecture_from(
            config, mlp_width=config.ffn_dim, activation=activation(config.activation_function),
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

    def first_position(self, model: Any) -> int:
        """Positions start at row 2 of the table."""
        return int(model.embed_positions.offset)

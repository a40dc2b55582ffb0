"""OPT, whose blocks are laid out as BART's."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.embedding import TextEmbedding
from rankscope.sources.families.bart import Bart
from rankscope.sources.families.family import architecture_from, linear_weights


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

"""ESM, language models of proteins: BERT's parts, pre-norm, with rotary or absolute positions."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.embedding import TextEmbedding
from rankscope.sources.families.bert import Bert
from rankscope.sources.families.family import architecture_from, norm_weights, require
from rankscope.sources.families.rotary import angles


class Esm(Bert):
    """ESM-2 (rotary positions) and ESM-1b (absolute ones)."""

    name, types = "esm", ("esm",)
    final_norm = "encoder.emb_layer_norm_after"
    parts: ClassVar = {**Bert.parts, "attention_norm": "attention.LayerNorm", "mlp_norm": "LayerNorm"}
    embedding_parts: ClassVar = {"words": "embeddings.word_embeddings"}

    def architecture(self, config: Any) -> Architecture:
        """Pre-norm with a last norm; its code reads no activation but gelu."""
        require(config, add_cross_attention=False, is_folding_model=False)
        rotary: dict[str, Any] = {}
        if config.position_embedding_type == "rotary":
            width = config.hidden_size // config.num_attention_heads
            rotary = {"positions": "rotary", "rotary_frequencies": (angles(config.rope_theta, width),)}
        return architecture_from(
            config, activation="gelu", norm_place="pre", norm_eps=config.layer_norm_eps, final_norm=True,
            mask="causal" if config.is_decoder else "complete", **rotary,
        )  # fmt: skip

    def architecture_of(self, model: Any) -> Architecture:
        """Angles are saved with the weights, and may have been rounded to float16 there."""
        arch, rotary = super().architecture_of(model), model.rotary_embeddings
        return arch if rotary is None else arch.replace(rotary_frequencies=(tuple(rotary.inv_freq.double().tolist()),))

    def embedding(self, model: Any) -> TextEmbedding:
        """Words, scaled by how many of a sample are masked; positions and a norm where the model has them."""
        parts, config = model.embeddings, model.config
        more: dict[str, Any] = {"mask_id": config.mask_token_id if config.token_dropout else None}
        if config.position_embedding_type == "absolute":
            more["positions"] = parts.position_embeddings.weight.detach()[self.first_position(model) :]
        if parts.layer_norm is not None:
            more |= {"norm": norm_weights(parts.layer_norm), "norm_eps": parts.layer_norm.eps}
        return self.text(model, **more)

    def first_position(self, model: Any) -> int:
        """Rows of the table up to the padding id are not used."""
        return int(model.config.pad_token_id) + 1

"""CLIP and SigLIP: a tower for texts and one for images, each a family; a model of both is loaded as one of
them, `load(model, family="clip_vision")`."""

from typing import Any, ClassVar

from rankscope.sources.embedding import ImageEmbedding
from rankscope.sources.families.family import CAUSAL, PRE, Family, image_embedding, layout, norm_weights


class Tower(Family):
    """What the four have in common: pre-norm blocks."""

    stack = "encoder.layers"
    parts: ClassVar = layout(
        "self_attn", "q_proj k_proj v_proj out_proj", norms="layer_norm1 layer_norm2", mlp="mlp.fc1 mlp.fc2"
    )
    fixed: ClassVar = PRE


class ClipText(Tower):
    """CLIP's text tower, whose attention is causal."""

    name, types = "clip_text", ("clip_text_model",)
    inside, final_norm = "text_model", "final_layer_norm"
    fixed: ClassVar = CAUSAL
    embedding_parts: ClassVar = {"words": "embeddings.token_embedding", "positions": "embeddings.position_embedding"}


class ClipVision(Tower):
    """CLIP's image tower. Its last norm is of the class token alone, and not the network's."""

    name, types = "clip_vision", ("clip_vision_model",)
    inside, continuous_inputs = "vision_model", True
    fixed: ClassVar = {"norm_place": "pre"}

    def embedding(self, model: Any) -> ImageEmbedding:
        """Patches, a class token and positions, through a norm."""
        parts, norm = model.embeddings, model.pre_layrnorm
        return images(model, first=parts.class_embedding.detach(), norm=norm_weights(norm), norm_eps=norm.eps)


class SiglipText(ClipText):
    """SigLIP's text tower: every token sees every other."""

    name, types, loader = "siglip_text", ("siglip_text_model",), "SiglipTextModel"
    fixed = PRE


class SiglipVision(Tower):
    """SigLIP's image tower: no class token."""

    name, types = "siglip_vision", ("siglip_vision_model",)
    inside, continuous_inputs, final_norm = "vision_model", True, "post_layernorm"

    def embedding(self, model: Any) -> ImageEmbedding:
        """The sum of patches and positions."""
        return images(model)


def images(model: Any, **more: Any) -> ImageEmbedding:
    """Patches and positions, and `more`."""
    parts = model.embeddings
    return image_embedding(parts.patch_embedding, parts.position_embedding.weight, parts.image_size, **more)

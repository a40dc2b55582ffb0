"""CLIP and SigLIP: a tower for texts and one for images, each a family; a model of both is loaded as one of
them, `load(model, family="clip_vision")`."""

from typing import Any, ClassVar

from torch import nn

from rankscope.nets import Architecture
from rankscope.sources.embedding import ImageEmbedding, TextEmbedding
from rankscope.sources.families.family import (
    SMALL,
    SMALL_TEXT,
    Family,
    ModulePaths,
    architecture_from,
    norm_weights,
)


class Tower(Family):
    """What the four have in common: pre-norm blocks."""

    tower: ClassVar[str]
    """Where a model of both keeps it."""
    stack = "encoder.layers"
    parts: ClassVar[ModulePaths] = {
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.out_proj",
        "attention_norm": "layer_norm1",
        "mlp.up": "mlp.fc1",
        "mlp.down": "mlp.fc2",
        "mlp_norm": "layer_norm2",
    }
    mask: ClassVar[str] = "complete"

    def core(self, model: nn.Module) -> Any:
        """The tower of a model of both, or of one with a head."""
        base = super().core(model)
        return getattr(base, self.tower, base)

    def architecture(self, config: Any) -> Architecture:
        """Pre-norm; a last norm where the tower's output has one."""
        return architecture_from(
            config, norm_place="pre", norm_eps=config.layer_norm_eps, mask=self.mask,
            final_norm=bool(self.final_norm),
        )  # fmt: skip


class ClipText(Tower):
    """CLIP's text tower, whose attention is causal."""

    name = "clip_text"
    types = ("clip_text_model",)
    tower, final_norm, mask = "text_model", "final_layer_norm", "causal"
    embedding_parts: ClassVar[ModulePaths] = {
        "words": "embeddings.token_embedding",
        "positions": "embeddings.position_embedding",
    }

    def embedding(self, model: Any) -> TextEmbedding:
        """The sum of words and positions."""
        return self.text(model)

    def tiny_configs(self) -> dict[str, Any]:
        """One config for the text tower."""
        from transformers import CLIPTextConfig

        return {
            "text": CLIPTextConfig(
                **SMALL_TEXT, intermediate_size=24, pad_token_id=1, bos_token_id=2, eos_token_id=3
            )
        }


class ClipVision(Tower):
    """CLIP's image tower. Its last norm is of the class token alone, and not the network's."""

    name = "clip_vision"
    types = ("clip_vision_model",)
    tower, continuous_inputs = "vision_model", True

    def embedding(self, model: Any) -> ImageEmbedding:
        """Patches, a class token and positions, through a norm."""
        parts, norm = model.embeddings, model.pre_layrnorm
        return images(model, first=parts.class_embedding.detach(), norm=norm_weights(norm), norm_eps=norm.eps)

    def tiny_configs(self) -> dict[str, Any]:
        """One config with nine patches."""
        from transformers import CLIPVisionConfig

        return {"image": CLIPVisionConfig(**SMALL, intermediate_size=24, image_size=12, patch_size=4)}


class SiglipText(ClipText):
    """SigLIP's text tower: every token sees every other."""

    name, mask = "siglip_text", "complete"
    types = ("siglip_text_model",)
    loader = "SiglipTextModel"

    def tiny_configs(self) -> dict[str, Any]:
        """One config for the text tower."""
        from transformers import SiglipTextConfig

        return {
            "text": SiglipTextConfig(
                **SMALL_TEXT, intermediate_size=24, pad_token_id=1, bos_token_id=2, eos_token_id=3
            )
        }


class SiglipVision(Tower):
    """SigLIP's image tower: no class token."""

    name = "siglip_vision"
    types = ("siglip_vision_model",)
    tower, continuous_inputs, final_norm = "vision_model", True, "post_layernorm"

    def embedding(self, model: Any) -> ImageEmbedding:
        """The sum of patches and positions."""
        return images(model)

    def tiny_configs(self) -> dict[str, Any]:
        """One config with nine patches."""
        from transformers import SiglipVisionConfig

        return {"image": SiglipVisionConfig(**SMALL, intermediate_size=24, image_size=12, patch_size=4)}


def images(model: Any, **more: Any) -> ImageEmbedding:
    """Patches and positions, and `more`."""
    parts = model.embeddings
    size, patches = parts.image_size, parts.patch_embedding
    return ImageEmbedding(
        kernel=patches.weight.detach(),
        bias=None if patches.bias is None else patches.bias.detach(),
        positions=parts.position_embedding.weight.detach(),
        size=(size, size) if isinstance(size, int) else (int(size[0]), int(size[1])),
        **more,
    )

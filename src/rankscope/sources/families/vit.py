"""ViT and DeiT: patches of an image as tokens, pre-norm."""

from typing import Any, ClassVar

import torch

from rankscope.nets import Architecture
from rankscope.sources.embedding import ImageEmbedding
from rankscope.sources.families.family import Family, architecture_from, image_embedding, layout


class ViT(Family):
    """ViT: pre-norm, with a class token."""

    name = "vit"
    types: ClassVar[tuple[str, ...]] = ("vit",)
    continuous_inputs = True
    stack, final_norm = "layers", "layernorm"
    parts: ClassVar = layout(
        "attention", "q_proj k_proj v_proj o_proj", norms="layernorm_before layernorm_after", mlp="mlp.fc1 mlp.fc2"
    )

    def architecture(self, config: Any) -> Architecture:
        """Pre-norm with a last norm."""
        return architecture_from(config, norm_place="pre", norm_eps=config.layer_norm_eps, final_norm=True)

    def embedding(self, model: Any) -> ImageEmbedding:
        """Patches, a class token and positions."""
        parts, patches = model.embeddings, model.embeddings.patch_embeddings
        token, positions = parts.cls_token.detach()[0, 0], parts.position_embeddings[0]
        return image_embedding(patches.projection, positions, patches.image_size, first=token)


class DeiT(ViT):
    """DeiT: ViT with a second token, that of distillation."""

    name, types = "deit", ("deit",)

    def embedding(self, model: Any) -> ImageEmbedding:
        """Patches, two tokens before them, and positions."""
        parts, patches = model.embeddings, model.embeddings.patch_embeddings
        tokens = torch.cat([parts.cls_token, parts.distillation_token], 1).detach()[0]
        return image_embedding(patches.projection, parts.position_embeddings[0], patches.image_size, first=tokens)

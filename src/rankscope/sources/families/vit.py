"""ViT: patches of an image as tokens, pre-norm."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.embedding import ImageEmbedding
from rankscope.sources.families.family import SMALL, Family, ModulePaths, architecture_from


class ViT(Family):
    """ViT: pre-norm, with a class token."""

    name = "vit"
    types: ClassVar[tuple[str, ...]] = ("vit",)
    continuous_inputs = True
    stack, final_norm = "layers", "layernorm"
    parts: ClassVar[ModulePaths] = {
        "attention.query": "attention.q_proj",
        "attention.key": "attention.k_proj",
        "attention.value": "attention.v_proj",
        "attention.output": "attention.o_proj",
        "attention_norm": "layernorm_before",
        "mlp.up": "mlp.fc1",
        "mlp.down": "mlp.fc2",
        "mlp_norm": "layernorm_after",
    }

    def architecture(self, config: Any) -> Architecture:
        """Pre-norm with a last norm."""
        return architecture_from(config, norm_place="pre", norm_eps=config.layer_norm_eps, final_norm=True)

    def embedding(self, model: Any) -> ImageEmbedding:
        """Patches, a class token and positions."""
        parts = model.embeddings
        patches = parts.patch_embeddings
        size = patches.image_size
        return ImageEmbedding(
            kernel=patches.projection.weight.detach(),
            bias=None if patches.projection.bias is None else patches.projection.bias.detach(),
            first=parts.cls_token.detach()[0, 0],
            positions=parts.position_embeddings.detach()[0],
            size=(size, size) if isinstance(size, int) else (int(size[0]), int(size[1])),
        )

    def tiny_configs(self) -> dict[str, Any]:
        """One config with nine patches."""
        from transformers import ViTConfig

        return {"image": ViTConfig(**SMALL, intermediate_size=24, image_size=12, patch_size=4)}

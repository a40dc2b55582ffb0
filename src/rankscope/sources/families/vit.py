"""ViT: patches of an image as tokens, pre-norm."""

from typing import Any, ClassVar

from rankscope.nets import Architecture
from rankscope.sources.embedding import ImageEmbedding
from rankscope.sources.families.family import Family, Tensors, activation, dense, heads_in, heads_out, norm


class ViT(Family):
    """ViT."""

    name = "vit"
    types: ClassVar[tuple[str, ...]] = ("vit",)
    sees = True

    def architecture(self, config: Any) -> Architecture:
        """Pre-norm with a last norm."""
        return Architecture(
            layers=config.num_hidden_layers, width=config.hidden_size, heads=config.num_attention_heads,
            mlp_width=config.intermediate_size, activation=activation(config.hidden_act), norm_place="pre",
            norm_eps=config.layer_norm_eps, final_norm=True,
        )  # fmt: skip

    def blocks(self, model: Any) -> list[Any]:
        """The layers."""
        return list(model.layers)

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """Query, key and value apart."""
        attention = block.attention
        return {
            **heads_in("query", attention.q_proj, arch.heads),
            **heads_in("key", attention.k_proj, arch.heads),
            **heads_in("value", attention.v_proj, arch.heads),
            **heads_out(attention.o_proj, arch.heads),
            **norm("attention_norm", block.layernorm_before),
            **dense("mlp.up", block.mlp.fc1),
            **dense("mlp.down", block.mlp.fc2),
            **norm("mlp_norm", block.layernorm_after),
        }

    def others(self, model: Any) -> Tensors:
        """The last norm."""
        return norm("final_norm", model.layernorm)

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

    def tiny(self) -> dict[str, Any]:
        """Nine patches."""
        from transformers import ViTConfig

        return {
            "image": ViTConfig(
                hidden_size=16, num_hidden_layers=3, num_attention_heads=4, intermediate_size=24,
                image_size=12, patch_size=4,
            )
        }  # fmt: skip

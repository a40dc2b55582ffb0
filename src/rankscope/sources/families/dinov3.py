"""DINOv3: DINOv2's blocks, whose heads are rotated by where a patch lies in the image."""

import math
from types import FunctionType, MethodType
from typing import Any, ClassVar

import torch

from rankscope.nets import Architecture
from rankscope.sources.embedding import ImageEmbedding
from rankscope.sources.families.dinov2 import DinoV2
from rankscope.sources.families.family import architecture_from, image_embedding

COORDINATES = "get_patches_center_coordinates"


class DinoV3(DinoV2):
    """DINOv3 with plain or gated MLPs, on images of the size that its config says."""

    name, types = "dinov3", ("dinov3_vit",)
    stack, final_norm = "model.layer", "norm"
    parts: ClassVar = {**DinoV2.parts, "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj"}

    def core(self, model: Any) -> Any:
        """The model with its embedding, not the encoder in it, which goes by the name of a base model."""
        return model if hasattr(model, "rope_embeddings") else super().core(model)

    def architecture(self, config: Any) -> Architecture:
        """Pre-norm with a last norm; the class token and registers are not rotated."""
        width = config.hidden_size // config.num_attention_heads
        frequency = 2 * math.pi * (1 / config.rope_theta ** torch.arange(0, 1, 4 / width, dtype=torch.float)).double()
        sizes = zip(_pair(config.image_size), _pair(config.patch_size), strict=True)
        rows, columns = (size // patch for size, patch in sizes)
        return architecture_from(
            config, positions="rotary", rotary_frequencies=(tuple(frequency.repeat(2).tolist()),),
            rotary_grid=(rows, columns, 1 + config.num_register_tokens), norm_place="pre", final_norm=True,
            mlp="gated" if config.use_gated_mlp else "plain", norm_eps=config.layer_norm_eps,
        )  # fmt: skip

    def blocks(self, model: Any) -> list[Any]:
        """The layers of the model's encoder."""
        return list(model.model.layer)

    def embedding(self, model: Any) -> ImageEmbedding:
        """A class token, registers and patches, without positions."""
        parts = model.embeddings
        first = torch.cat([parts.cls_token, parts.register_tokens], 1).detach()[0]
        return image_embedding(parts.patch_embeddings, None, _pair(model.config.image_size), first=first)

    def prepare_for_float64(self, model: Any) -> Any:
        """Where patches lie is computed each time: a cache would give out float32 numbers for float64."""
        rope = model.rope_embeddings
        forward = type(rope).forward
        names = forward.__globals__ | {COORDINATES: forward.__globals__[COORDINATES].__wrapped__}
        rope.forward = MethodType(FunctionType(forward.__code__, names), rope)
        return model


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))

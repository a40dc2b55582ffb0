"""DINOv2: ViT's blocks with scaled branches."""

from typing import Any, ClassVar

import torch

from rankscope.nets import Architecture
from rankscope.sources.embedding import ImageEmbedding
from rankscope.sources.families.family import Tensors, architecture_from, image_embedding, read_block
from rankscope.sources.families.vit import ViT

GATED = {"mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj"}


class DinoV2(ViT):
    """DINOv2 with plain or gated MLPs."""

    name, types = "dinov2", ("dinov2",)
    parts: ClassVar = {**ViT.parts, "attention_norm": "norm1", "mlp_norm": "norm2"}

    def architecture(self, config: Any) -> Architecture:
        """Pre-norm with a last norm."""
        gated, inner = config.use_swiglu_ffn, int(config.hidden_size * config.mlp_ratio)
        return architecture_from(
            config, mlp="gated" if gated else "plain",
            mlp_width=(int(inner * 2 / 3) + 7) // 8 * 8 if gated else inner,
            activation="silu" if gated else config.hidden_act, norm_place="pre",
            norm_eps=config.layer_norm_eps, final_norm=True,
        )  # fmt: skip

    def blocks(self, model: Any) -> list[Any]:
        """The layers of the model's encoder."""
        return list(getattr(model.encoder, "layers", None) or model.encoder.layer)

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """What a branch adds is scaled entry by entry: so are its last matrix and bias."""
        tensors = read_block(block, {**self.parts, **(GATED if arch.mlp == "gated" else {})}, arch)
        for last, scale in (("attention.output", block.layer_scale1), ("mlp.down", block.layer_scale2)):
            tensors |= {name: part * scale.lambda1 for name, part in tensors.items() if name.startswith(last)}
        return tensors


class DinoV2Registers(DinoV2):
    """DINOv2 with register tokens, which have no positions, after the class token."""

    name, types = "dinov2_with_registers", ("dinov2_with_registers",)

    def embedding(self, model: Any) -> ImageEmbedding:
        """Patches and a class token with positions, and registers without."""
        parts, patches = model.embeddings, model.embeddings.patch_embeddings
        registers, places = parts.register_tokens[0], parts.position_embeddings[0]
        tokens = torch.cat([parts.cls_token[0], registers]).detach()
        positions = torch.cat([places[:1], torch.zeros_like(registers), places[1:]])
        return image_embedding(patches.projection, positions, patches.image_size, first=tokens)

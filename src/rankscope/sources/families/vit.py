"""ViT and its kin: patches of an image or of a spectrum as tokens, pre-norm. DINO scales what branches add. CLIP and
SigLIP have a tower for texts and one for images, each a family; a model of both is loaded as one of them,
`load(model, family="clip_vision")`."""

import math
from types import FunctionType, MethodType
from typing import Any, ClassVar

import torch

from rankscope.nets import Architecture
from rankscope.sources.embedding import SpectrumEmbedding
from rankscope.sources.families.family import CAUSAL, PRE, Family
from rankscope.sources.families.parts import layout, sides, without

COORDINATES = "get_patches_center_coordinates"


class ViT(Family):
    """ViT: pre-norm, with a class token."""

    name = "vit"
    types: ClassVar[tuple[str, ...]] = ("vit",)
    continuous_inputs = True
    stack, final_norm = "layers", "layernorm"
    parts: ClassVar = layout(
        "attention", "q_proj k_proj v_proj o_proj", norms="layernorm_before layernorm_after", mlp="mlp.fc1 mlp.fc2"
    )
    embedding_parts: ClassVar = {
        "patches": "embeddings.patch_embeddings.projection", "size": "embeddings.patch_embeddings.image_size",
        "first": "embeddings.cls_token", "positions": "embeddings.position_embeddings",
    }  # fmt: skip
    fixed: ClassVar = PRE


DeiT = ViT.like(
    "deit", "DeiT: ViT with a second token, that of distillation.", types=("deit",),
    embedding_parts={**ViT.embedding_parts, "first": "embeddings.cls_token, embeddings.distillation_token"},
)  # fmt: skip


class AST(ViT):
    """The Audio Spectrogram Transformer: DeiT on patches of a mel spectrum, which overlap."""

    name, types = "ast", ("audio-spectrogram-transformer",)
    input_name: ClassVar[str] = "input_values"

    def embedding(self, model: Any) -> SpectrumEmbedding:
        """Patches of the spectrum, two tokens before them, and positions."""
        config, parts = model.config, model.embeddings
        patches, tokens = parts.patch_embeddings.projection, torch.cat([parts.cls_token, parts.distillation_token], 1)
        return SpectrumEmbedding(
            patches.weight.detach(), patches.bias.detach(), parts.position_embeddings.detach()[0], tokens.detach()[0],
            (config.frequency_stride, config.time_stride), (config.max_length, config.num_mel_bins),
        )  # fmt: skip


class DinoV2(ViT):
    """DINOv2 with plain or gated MLPs."""

    name, types = "dinov2", ("dinov2",)
    stack = "encoder.layers or encoder.layer"
    parts: ClassVar = {
        **ViT.parts, "attention_norm": "norm1", "mlp.gate": "mlp.gate_proj or none", "mlp.up": "mlp.fc1 or mlp.up_proj",
        "mlp.down": "mlp.fc2 or mlp.down_proj", "mlp_norm": "norm2",
    }  # fmt: skip
    scales: ClassVar = {"attention.output": "layer_scale1.lambda1", "mlp.down": "layer_scale2.lambda1"}

    def architecture(self, config: Any) -> Architecture:
        """A gated MLP is narrower, and has an activation of its own."""
        inner = int(config.hidden_size * config.mlp_ratio)
        if not config.use_swiglu_ffn:
            return self.described(config, mlp_width=inner)
        return self.described(config, mlp="gated", mlp_width=(int(inner * 2 / 3) + 7) // 8 * 8, activation="silu")


DinoV2Registers = DinoV2.like(
    "dinov2_with_registers",
    "DINOv2 with register tokens, which have no positions, after the class token.",
    types=("dinov2_with_registers",),
    embedding_parts={**ViT.embedding_parts, "first": "embeddings.cls_token, embeddings.register_tokens"},
)


class DinoV3(DinoV2):
    """DINOv3 with plain or gated MLPs, on images of the size that its config says."""

    name, types = "dinov3", ("dinov3_vit",)
    stack, final_norm = "model.layer", "norm"
    embedding_parts: ClassVar = {
        **without(DinoV2Registers.embedding_parts, "positions"),
        "patches": "embeddings.patch_embeddings", "size": "config.image_size",
    }  # fmt: skip
    fixed: ClassVar = {**PRE, "positions": "rotary"}

    def core(self, model: Any) -> Any:
        """The model with its embedding, not the encoder in it, which goes by the name of a base model."""
        return model if hasattr(model, "rope_embeddings") else super().core(model)

    def architecture(self, config: Any) -> Architecture:
        """The architecture of a config: patches are rotated by their place in the image, other tokens are not."""
        width = config.hidden_size // config.num_attention_heads
        frequency = 2 * math.pi * (1 / config.rope_theta ** torch.arange(0, 1, 4 / width, dtype=torch.float)).double()
        sizes = zip(sides(config.image_size), sides(config.patch_size), strict=True)
        rows, columns = (size // patch for size, patch in sizes)
        return self.described(
            config, rotary_frequencies=(tuple(frequency.repeat(2).tolist()),),
            rotary_grid=(rows, columns, 1 + config.num_register_tokens),
            mlp="gated" if config.use_gated_mlp else "plain",
        )  # fmt: skip

    def prepare_for_float64(self, model: Any) -> Any:
        """Where patches lie is computed each time: a cache would give out float32 numbers for float64."""
        rope = model.rope_embeddings
        forward = type(rope).forward
        names = forward.__globals__ | {COORDINATES: forward.__globals__[COORDINATES].__wrapped__}
        rope.forward = MethodType(FunctionType(forward.__code__, names), rope)
        return model


ClipText = Family.like(
    "clip_text", "CLIP's text tower, whose attention is causal.", types=("clip_text_model",), stack="encoder.layers",
    inside="text_model", final_norm="final_layer_norm",
    parts=layout(
        "self_attn", "q_proj k_proj v_proj out_proj", norms="layer_norm1 layer_norm2", mlp="mlp.fc1 mlp.fc2",
    ),
    fixed=CAUSAL,
    embedding_parts={"words": "embeddings.token_embedding", "positions": "embeddings.position_embedding"},
)  # fmt: skip


ClipVision = Family.like(
    "clip_vision", "CLIP's image tower. Its last norm is of the class token alone, and not the network's.",
    types=("clip_vision_model",), stack=ClipText.stack, inside="vision_model", continuous_inputs=True,
    parts=ClipText.parts, fixed={"norm_place": "pre"},
    embedding_parts={
        "patches": "embeddings.patch_embedding", "size": "embeddings.image_size", "norm": "pre_layrnorm",
        "first": "embeddings.class_embedding", "positions": "embeddings.position_embedding",
    },
)  # fmt: skip


SiglipText = ClipText.like(
    "siglip_text", "SigLIP's text tower: every token sees every other.", types=("siglip_text_model",),
    loader="SiglipTextModel", fixed=PRE,
)  # fmt: skip
SiglipVision = ClipVision.like(
    "siglip_vision", "SigLIP's image tower: no class token.", types=("siglip_vision_model",),
    final_norm="post_layernorm", fixed=PRE, embedding_parts=without(ClipVision.embedding_parts, "first", "norm"),
)  # fmt: skip

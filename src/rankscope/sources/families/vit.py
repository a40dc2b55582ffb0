"""ViT and its kin: patches of an image or of a spectrum as tokens, pre-norm. DINO scales what branches add. CLIP and
SigLIP have a tower for texts and one for images, each a family; a model of both is loaded as one of them,
`load(model, family="clip_vision")`."""

import math
from types import FunctionType, MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor

from rankscope.nets import Architecture
from rankscope.sources.embedding import Embedding, ImageEmbedding, SpectrumEmbedding
from rankscope.sources.families.family import CAUSAL, PRE, Family
from rankscope.sources.families.parts import ModulePaths, Tensors, image_embedding, layout, norm_weights, scaled, sides

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
    fixed: ClassVar = PRE

    def embedding(self, model: Any) -> Embedding:
        """Patches, a class token and positions."""
        return self.patches(model, first=model.embeddings.cls_token.detach()[0, 0])

    def patches(self, model: Any, **more: Any) -> ImageEmbedding:
        """Patches with positions, and what `more` says, of positions too."""
        parts, more = model.embeddings, {"positions": model.embeddings.position_embeddings[0], **more}
        return image_embedding(parts.patch_embeddings.projection, size=parts.patch_embeddings.image_size, **more)


class DeiT(ViT):
    """DeiT: ViT with a second token, that of distillation."""

    name, types = "deit", ("deit",)

    def embedding(self, model: Any) -> Embedding:
        """Patches, two tokens before them, and positions."""
        return self.patches(model, first=self.tokens(model))

    def tokens(self, model: Any) -> Tensor:
        """The class token and that of distillation."""
        return torch.cat([model.embeddings.cls_token, model.embeddings.distillation_token], 1).detach()[0]


class AST(DeiT):
    """The Audio Spectrogram Transformer: DeiT on patches of a mel spectrum, which overlap."""

    name, types = "ast", ("audio-spectrogram-transformer",)
    input_name: ClassVar[str] = "input_values"

    def embedding(self, model: Any) -> Embedding:
        """Patches of the spectrum, two tokens before them, and positions."""
        config, patches = model.config, model.embeddings.patch_embeddings.projection
        return SpectrumEmbedding(
            patches.weight.detach(), patches.bias.detach(), model.embeddings.position_embeddings.detach()[0],
            self.tokens(model), (config.frequency_stride, config.time_stride), (config.max_length, config.num_mel_bins),
        )  # fmt: skip


class DinoV2(ViT):
    """DINOv2 with plain or gated MLPs."""

    name, types = "dinov2", ("dinov2",)
    parts: ClassVar = {**ViT.parts, "attention_norm": "norm1", "mlp_norm": "norm2"}
    gated: ClassVar = {"mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj"}

    def architecture(self, config: Any) -> Architecture:
        """A gated MLP is narrower, and has an activation of its own."""
        inner = int(config.hidden_size * config.mlp_ratio)
        if not config.use_swiglu_ffn:
            return self.described(config, mlp_width=inner)
        return self.described(config, mlp="gated", mlp_width=(int(inner * 2 / 3) + 7) // 8 * 8, activation="silu")

    def paths(self, arch: Architecture) -> ModulePaths:
        """The maps of an MLP have other names where it is gated."""
        return {**self.parts, **(self.gated if arch.mlp == "gated" else {})}

    def blocks(self, model: Any) -> list[Any]:
        """The layers of the model's encoder."""
        return list(getattr(model.encoder, "layers", None) or model.encoder.layer)

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """What a branch adds is scaled entry by entry."""
        tensors = scaled(super().layer(block, arch), "attention.output", block.layer_scale1.lambda1)
        return scaled(tensors, "mlp.down", block.layer_scale2.lambda1)


class DinoV2Registers(DinoV2):
    """DINOv2 with register tokens, which have no positions, after the class token."""

    name, types = "dinov2_with_registers", ("dinov2_with_registers",)

    def embedding(self, model: Any) -> ImageEmbedding:
        """Patches and a class token with positions, and registers without."""
        parts = model.embeddings
        registers, places = parts.register_tokens[0], parts.position_embeddings[0]
        positions = torch.cat([places[:1], torch.zeros_like(registers), places[1:]])
        return self.patches(model, positions=positions, first=torch.cat([parts.cls_token[0], registers]).detach())


class DinoV3(DinoV2):
    """DINOv3 with plain or gated MLPs, on images of the size that its config says."""

    name, types = "dinov3", ("dinov3_vit",)
    stack, final_norm = "model.layer", "norm"
    parts: ClassVar = {**DinoV2.parts, "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj"}
    fixed: ClassVar = {**PRE, "positions": "rotary"}
    blocks = Family.blocks

    def core(self, model: Any) -> Any:
        """The model with its embedding, not the encoder in it, which goes by the name of a base model."""
        return model if hasattr(model, "rope_embeddings") else super().core(model)

    def architecture(self, config: Any) -> Architecture:
        """Heads are rotated by where a patch lies in the image; the class token and registers are not."""
        width = config.hidden_size // config.num_attention_heads
        frequency = 2 * math.pi * (1 / config.rope_theta ** torch.arange(0, 1, 4 / width, dtype=torch.float)).double()
        sizes = zip(sides(config.image_size), sides(config.patch_size), strict=True)
        rows, columns = (size // patch for size, patch in sizes)
        return self.described(
            config, rotary_frequencies=(tuple(frequency.repeat(2).tolist()),),
            rotary_grid=(rows, columns, 1 + config.num_register_tokens),
            mlp="gated" if config.use_gated_mlp else "plain",
        )  # fmt: skip

    def embedding(self, model: Any) -> ImageEmbedding:
        """A class token, registers and patches, without positions."""
        parts = model.embeddings
        first = torch.cat([parts.cls_token, parts.register_tokens], 1).detach()[0]
        return image_embedding(parts.patch_embeddings, None, model.config.image_size, first=first)

    def prepare_for_float64(self, model: Any) -> Any:
        """Where patches lie is computed each time: a cache would give out float32 numbers for float64."""
        rope = model.rope_embeddings
        forward = type(rope).forward
        names = forward.__globals__ | {COORDINATES: forward.__globals__[COORDINATES].__wrapped__}
        rope.forward = MethodType(FunctionType(forward.__code__, names), rope)
        return model


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

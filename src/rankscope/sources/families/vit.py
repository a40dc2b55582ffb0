"""ViT, DeiT and AST: patches of an image or of a spectrum as tokens, pre-norm."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from rankscope.nets import Architecture
from rankscope.sources.embedding import Embedding, SpectrumEmbedding
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

    def embedding(self, model: Any) -> Embedding:
        """Patches, a class token and positions."""
        parts, patches = model.embeddings, model.embeddings.patch_embeddings
        token, positions = parts.cls_token.detach()[0, 0], parts.position_embeddings[0]
        return image_embedding(patches.projection, positions, patches.image_size, first=token)


class DeiT(ViT):
    """DeiT: ViT with a second token, that of distillation."""

    name, types = "deit", ("deit",)

    def embedding(self, model: Any) -> Embedding:
        """Patches, two tokens before them, and positions."""
        patches = model.embeddings.patch_embeddings
        positions = model.embeddings.position_embeddings[0]
        return image_embedding(patches.projection, positions, patches.image_size, first=self.tokens(model))

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

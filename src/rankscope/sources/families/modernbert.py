"""ModernBERT: pre-norm but for the first attention, rotary positions, gated MLP, windows in most layers."""

from typing import Any

from torch import Tensor

from rankscope.nets import Architecture
from rankscope.sources.embedding import TextEmbedding
from rankscope.sources.families.family import (
    Family,
    Tensors,
    activation,
    dense,
    heads_out,
    norm,
    norm_weights,
)
from rankscope.sources.families.rotary import angles, masks


class ModernBert(Family):
    """ModernBERT."""

    name = "modernbert"
    types = ("modernbert",)

    def architecture(self, config: Any) -> Architecture:
        """The first attention reads the embedding, which is normed already."""
        return Architecture(
            layers=config.num_hidden_layers, width=config.hidden_size, heads=config.num_attention_heads,
            mask=masks(config, "complete"), positions="rotary", rotary_frequencies=angles(config),
            mlp="gated", mlp_width=config.intermediate_size, activation=activation(config.hidden_activation),
            norm_place="pre", norm_eps=config.norm_eps, final_norm=True, bare_layers=(0,),
        )  # fmt: skip

    def blocks(self, model: Any) -> list[Any]:
        """The layers."""
        return list(model.layers)

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """Wqkv is query, key, value one above the other; Wi is what the activation takes, then the other."""
        parts: Tensors = {}
        for name, weight, bias in _split(block.attn.Wqkv, 3, ("query", "key", "value")):
            parts[f"attention.{name}.weight"] = weight.T.reshape(arch.width, arch.heads, -1)
            if bias is not None:
                parts[f"attention.{name}.bias"] = bias.reshape(arch.heads, -1)
        for name, weight, bias in _split(block.mlp.Wi, 2, ("gate", "up")):
            parts[f"mlp.{name}.weight"] = weight.T
            if bias is not None:
                parts[f"mlp.{name}.bias"] = bias
        bare = not hasattr(block.attn_norm, "weight")
        return {
            **parts,
            **heads_out(block.attn.Wo, arch.heads),
            **({} if bare else norm("attention_norm", block.attn_norm)),
            **dense("mlp.down", block.mlp.Wo),
            **norm("mlp_norm", block.mlp_norm),
        }

    def others(self, model: Any) -> Tensors:
        """The last norm."""
        return norm("final_norm", model.final_norm)

    def embedding(self, model: Any) -> TextEmbedding:
        """Words through a norm."""
        parts = model.embeddings
        return TextEmbedding(
            words=parts.tok_embeddings.weight.detach(),
            norm=norm_weights(parts.norm),
            norm_eps=parts.norm.eps,
        )

    def tiny(self) -> dict[str, Any]:
        """A global layer, then two local ones; without biases and with all of them."""
        from transformers import ModernBertConfig

        small: dict[str, Any] = {
            "vocab_size": 60,
            "hidden_size": 16,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 24,
            "max_position_embeddings": 32,
            "local_attention": 6,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
        }
        return {
            "no biases": ModernBertConfig(**small),
            "biases": ModernBertConfig(**small, attention_bias=True, mlp_bias=True, norm_bias=True),
        }


def _split(linear: Any, number: int, names: tuple[str, ...]) -> list[tuple[str, Tensor, Tensor | None]]:
    biases = (None,) * number if linear.bias is None else linear.bias.chunk(number)
    return list(zip(names, linear.weight.chunk(number), biases, strict=True))

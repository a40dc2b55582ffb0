"""GPT-2: pre-norm, causal, one fused projection."""

from typing import Any

from rankscope.nets import Architecture
from rankscope.sources.embedding import TextEmbedding
from rankscope.sources.families.family import (
    Family,
    Tensors,
    activation,
    dense,
    heads_out,
    matrix,
    norm,
    refuse,
)


class GPT2(Family):
    """GPT-2, with its two scalings of scores folded into the queries."""

    name = "gpt2"
    types = ("gpt2",)

    def architecture(self, config: Any) -> Architecture:
        """Pre-norm with a last norm."""
        refuse(config, add_cross_attention=False)
        return Architecture(
            layers=config.n_layer, width=config.n_embd, heads=config.n_head, mask="causal",
            mlp_width=config.n_inner or 4 * config.n_embd, activation=activation(config.activation_function),
            norm_place="pre", norm_eps=config.layer_norm_epsilon, final_norm=True,
        )  # fmt: skip

    def blocks(self, model: Any) -> list[Any]:
        """The blocks."""
        return list(model.h)

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """c_attn is query, key, value side by side; a scaling of its own per layer goes into the query."""
        fused = matrix(block.attn.c_attn).chunk(3, 1)
        biases = block.attn.c_attn.bias.chunk(3)
        scale = block.attn.scaling * arch.divisor
        parts: Tensors = {}
        for name, weight, bias in zip(("query", "key", "value"), fused, biases, strict=True):
            factor = scale if name == "query" else 1.0
            parts[f"attention.{name}.weight"] = factor * weight.reshape(arch.width, arch.heads, -1)
            parts[f"attention.{name}.bias"] = factor * bias.reshape(arch.heads, -1)
        return {
            **parts,
            **heads_out(block.attn.c_proj, arch.heads),
            **norm("attention_norm", block.ln_1),
            **dense("mlp.up", block.mlp.c_fc),
            **dense("mlp.down", block.mlp.c_proj),
            **norm("mlp_norm", block.ln_2),
        }

    def others(self, model: Any) -> Tensors:
        """The last norm."""
        return norm("final_norm", model.ln_f)

    def widen(self, model: Any) -> Any:
        """Attention upcast to float32 (Stanford's GPT-2) fails on scores in float64; without the upcast it is
        the usual one."""
        for block in model.h:
            block.attn.reorder_and_upcast_attn = False
        return model

    def embedding(self, model: Any) -> TextEmbedding:
        """Words and positions."""
        return TextEmbedding(words=model.wte.weight.detach(), positions=model.wpe.weight.detach())

    def tiny(self) -> dict[str, Any]:
        """As published, and with scores scaled by layer."""
        from transformers import GPT2Config

        small: dict[str, Any] = {
            "vocab_size": 60,
            "n_embd": 16,
            "n_layer": 3,
            "n_head": 4,
            "n_inner": 24,
            "n_positions": 32,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        return {
            "decoder": GPT2Config(**small),
            "scores by layer": GPT2Config(**small, scale_attn_by_inverse_layer_idx=True),
        }

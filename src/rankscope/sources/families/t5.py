"""T5's encoder: RMSNorm before, a learned bias on scores by distance, no divisor."""

from typing import Any

from rankscope.nets import Architecture
from rankscope.sources.embedding import TextEmbedding
from rankscope.sources.families.family import (
    Family,
    Tensors,
    activation,
    dense,
    heads_in,
    heads_out,
    norm,
    refuse,
)


class T5(Family):
    """T5 and T5 1.1 (gated), the encoder."""

    name = "t5"
    types = ("t5",)
    loader = "T5EncoderModel"

    def core(self, model: Any) -> Any:
        """The encoder."""
        base = super().core(model)
        return getattr(base, "encoder", base)

    def architecture(self, config: Any) -> Architecture:
        """Pre-norm with a last norm."""
        refuse(config, is_decoder=False)
        return Architecture(
            layers=config.num_layers, width=config.d_model, heads=config.num_heads, head_width=config.d_kv,
            divisor=1.0, positions="bias", bias_buckets=config.relative_attention_num_buckets,
            bias_reach=config.relative_attention_max_distance,
            mlp="gated" if config.is_gated_act else "plain", mlp_width=config.d_ff,
            activation=activation(config.dense_act_fn), norm="rms", norm_place="pre",
            norm_eps=config.layer_norm_epsilon, final_norm=True,
        )  # fmt: skip

    def blocks(self, model: Any) -> list[Any]:
        """The encoder's blocks."""
        return list(model.block)

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """Attention, then MLP."""
        first, second = block.layer
        attention, mlp = first.SelfAttention, second.DenseReluDense
        if arch.mlp == "gated":
            inward = dense("mlp.gate", mlp.wi_0) | dense("mlp.up", mlp.wi_1)
        else:
            inward = dense("mlp.up", mlp.wi)
        return {
            **heads_in("query", attention.q, arch.heads),
            **heads_in("key", attention.k, arch.heads),
            **heads_in("value", attention.v, arch.heads),
            **heads_out(attention.o, arch.heads),
            **norm("attention_norm", first.layer_norm),
            **inward,
            **dense("mlp.down", mlp.wo),
            **norm("mlp_norm", second.layer_norm),
        }

    def others(self, model: Any) -> Tensors:
        """The last norm, and the table of biases, which the first block keeps for all."""
        table = model.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        return {**norm("final_norm", model.final_layer_norm), "bias_table": table}

    def embedding(self, model: Any) -> TextEmbedding:
        """Words alone."""
        return TextEmbedding(words=model.embed_tokens.weight.detach())

    def tiny(self) -> dict[str, Any]:
        """T5, and T5 1.1 with its gate."""
        from transformers import T5Config

        small: dict[str, Any] = {
            "vocab_size": 60,
            "d_model": 16,
            "d_kv": 6,
            "d_ff": 24,
            "num_layers": 3,
            "num_heads": 4,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 10,
        }
        return {"plain": T5Config(**small), "gated": T5Config(**small, feed_forward_proj="gated-gelu")}

"""OPT: a causal decoder, pre-norm but for the 350M model, which is post-norm with a narrow embedding."""

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
    linear_weights,
    norm,
)


class OPT(Family):
    """OPT."""

    name = "opt"
    types = ("opt",)

    def core(self, model: Any) -> Any:
        """The decoder."""
        base = super().core(model)
        return getattr(base, "decoder", base)

    def architecture(self, config: Any) -> Architecture:
        """torch's usual eps."""
        return Architecture(
            layers=config.num_hidden_layers, width=config.hidden_size, heads=config.num_attention_heads,
            mlp_width=config.ffn_dim, activation=activation(config.activation_function), mask="causal",
            norm_place="pre" if config.do_layer_norm_before else "post", norm_eps=1e-5,
            final_norm=config.do_layer_norm_before and not config._remove_final_layer_norm,
        )  # fmt: skip

    def blocks(self, model: Any) -> list[Any]:
        """The decoder's layers."""
        return list(model.layers)

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """Query, key and value apart."""
        attention = block.self_attn
        return {
            **heads_in("query", attention.q_proj, arch.heads),
            **heads_in("key", attention.k_proj, arch.heads),
            **heads_in("value", attention.v_proj, arch.heads),
            **heads_out(attention.out_proj, arch.heads),
            **norm("attention_norm", block.self_attn_layer_norm),
            **dense("mlp.up", block.fc1),
            **dense("mlp.down", block.fc2),
            **norm("mlp_norm", block.final_layer_norm),
        }

    def others(self, model: Any) -> Tensors:
        """The last norm, where there is one."""
        return {} if model.final_layer_norm is None else norm("final_norm", model.final_layer_norm)

    def output(self, model: Any) -> bool:
        """A narrow embedding comes with a projection back to it."""
        return model.project_out is None

    def embedding(self, model: Any) -> TextEmbedding:
        """Positions start at row 2."""
        return TextEmbedding(
            words=model.embed_tokens.weight.detach(),
            before=None if model.project_in is None else linear_weights(model.project_in),
            positions=model.embed_positions.weight.detach()[model.embed_positions.offset :],
        )

    def tiny(self) -> dict[str, Any]:
        """Pre-norm, and as the 350M model is."""
        from transformers import OPTConfig

        small: dict[str, Any] = {
            "vocab_size": 60,
            "hidden_size": 16,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "ffn_dim": 24,
            "max_position_embeddings": 32,
        }
        return {
            "pre-norm": OPTConfig(**small, word_embed_proj_dim=16),
            "post-norm, narrow": OPTConfig(**small, word_embed_proj_dim=8, do_layer_norm_before=False),
        }

"""DINOv2: ViT with a learned scale on every branch, which is folded into the branch's last matrix."""

from typing import Any

from rankscope.nets import Architecture
from rankscope.sources.families.family import Tensors, activation, dense, heads_in, heads_out, norm
from rankscope.sources.families.vit import ViT


class DinoV2(ViT):
    """DINOv2, plain or gated."""

    name = "dinov2"
    types = ("dinov2",)

    def architecture(self, config: Any) -> Architecture:
        """Pre-norm with a last norm."""
        inner = int(config.hidden_size * config.mlp_ratio)
        return Architecture(
            layers=config.num_hidden_layers, width=config.hidden_size, heads=config.num_attention_heads,
            mlp="gated" if config.use_swiglu_ffn else "plain",
            mlp_width=(int(inner * 2 / 3) + 7) // 8 * 8 if config.use_swiglu_ffn else inner,
            activation="silu" if config.use_swiglu_ffn else activation(config.hidden_act), norm_place="pre",
            norm_eps=config.layer_norm_eps, final_norm=True,
        )  # fmt: skip

    def blocks(self, model: Any) -> list[Any]:
        """The encoder's layers."""
        return list(getattr(model.encoder, "layers", None) or model.encoder.layer)

    def layer(self, block: Any, arch: Architecture) -> Tensors:
        """What a branch adds is scaled entry by entry: so are its last matrix and bias."""
        attention, mlp = block.attention, block.mlp
        if arch.mlp == "gated":
            inward = dense("mlp.gate", mlp.gate_proj) | dense("mlp.up", mlp.up_proj)
            outward = dense("mlp.down", mlp.down_proj)
        else:
            inward, outward = dense("mlp.up", mlp.fc1), dense("mlp.down", mlp.fc2)
        said = heads_out(attention.o_proj, arch.heads)
        return {
            **heads_in("query", attention.q_proj, arch.heads),
            **heads_in("key", attention.k_proj, arch.heads),
            **heads_in("value", attention.v_proj, arch.heads),
            **{name: part * block.layer_scale1.lambda1 for name, part in said.items()},
            **norm("attention_norm", block.norm1),
            **inward,
            **{name: part * block.layer_scale2.lambda1 for name, part in outward.items()},
            **norm("mlp_norm", block.norm2),
        }

    def tiny(self) -> dict[str, Any]:
        """Plain and gated."""
        from transformers import Dinov2Config

        small: dict[str, Any] = {
            "hidden_size": 16,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 12,
            "patch_size": 4,
        }
        return {"plain": Dinov2Config(**small), "gated": Dinov2Config(**small, use_swiglu_ffn=True)}

"""GPT-J: Phi's blocks, whose heads are rotated by neighbouring pairs."""

from typing import Any, ClassVar

import torch

from rankscope.nets import Architecture
from rankscope.sources.families.family import Family, architecture_from, layout
from rankscope.sources.families.rotary import angles


class GPTJ(Family):
    """GPT-J: causal, parallel branches that read through one norm, heads rotated in part."""

    name, types = "gptj", ("gptj",)
    stack, final_norm = "h", "ln_f"
    parts: ClassVar = layout("attn", "q_proj k_proj v_proj out_proj", norms="ln_1 ln_1", mlp="mlp.fc_in mlp.fc_out")
    embedding_parts: ClassVar = {"words": "wte"}

    def architecture(self, config: Any) -> Architecture:
        """Pre-norm with a last norm; the base of its angles is fixed, and so is the length of its table of them."""
        width = config.hidden_size // config.num_attention_heads
        turned = config.rotary_dim or width
        return architecture_from(
            config, mlp_width=config.n_inner or 4 * config.n_embd, activation=config.activation_function,
            mask="causal", norm_place="pre", norm_eps=config.layer_norm_epsilon, final_norm=True, parallel=True,
            positions="rotary", rotary_frequencies=(angles(10000, turned),), rotary_share=turned / width,
            rotary_pairs="adjacent", rotary_reach=config.n_positions,
        )  # fmt: skip

    def prepare_for_float64(self, model: Any) -> Any:
        """Sines and cosines are a table of float32 numbers: in float64, of the same angles."""
        for block in model.h:
            attention = block.attn
            frequency = torch.tensor(angles(10000, attention.pos_embd_dim), dtype=torch.float64)
            angle = torch.arange(attention.max_positions, dtype=torch.float64)[:, None] * frequency
            attention.embed_positions = torch.cat([angle.sin(), angle.cos()], 1)
        return model

"""GPT-Neo: GPT-2's blocks, of which every other has a window."""

from typing import Any, ClassVar

from rankscope.errors import SourceError, one_of
from rankscope.nets import Architecture
from rankscope.sources.families.family import Family, architecture_from, layout


class GPTNeo(Family):
    """GPT-Neo: causal, pre-norm, with scores that are not divided."""

    name, types = "gpt_neo", ("gpt_neo",)
    stack, final_norm = "h", "ln_f"
    parts: ClassVar = layout(
        "attn.attention", "q_proj k_proj v_proj out_proj", norms="ln_1 ln_2", mlp="mlp.c_fc mlp.c_proj"
    )
    embedding_parts: ClassVar = {"words": "wte", "positions": "wpe"}

    def architecture(self, config: Any) -> Architecture:
        """Pre-norm with a last norm; a local layer sees its own token and those before it, a window of them."""
        known = {"global": "causal", "local": f"causal&window:{config.window_size - 1}"}
        for kind in config.attention_layers:
            if kind not in known:
                raise SourceError(one_of("kind of attention", kind, known), subject="attention_types")
        return architecture_from(
            config, mlp_width=config.intermediate_size or 4 * config.hidden_size,
            activation=config.activation_function, mask=";".join(known[kind] for kind in config.attention_layers),
            divisor=1.0, norm_place="pre", norm_eps=config.layer_norm_epsilon, final_norm=True,
        )  # fmt: skip

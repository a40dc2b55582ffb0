"""The usual sizes, as architectures: what `fresh` builds and `rankscope measure` names.

Absolute positions belong to the embedding, and so come with the tokens.
"""

from rankscope.errors import ArchitectureError, one_of
from rankscope.naming import forgiven
from rankscope.nets import Architecture

_BERT = Architecture(layers=12, width=768, heads=12)
_GPT2 = Architecture(
    layers=12, width=768, heads=12, mask="causal", activation="gelu_tanh",
    norm_place="pre", norm_eps=1e-5, final_norm=True,
)  # fmt: skip
_LLAMA = Architecture(
    layers=16, width=2048, heads=32, key_heads=8, mask="causal", positions="rotary", rotary_base=500000.0,
    mlp="gated", mlp_width=8192, activation="silu", norm="rms", norm_place="pre", norm_eps=1e-5,
    final_norm=True, biases=(),
)  # fmt: skip
_NEOX = Architecture(
    layers=12, width=768, heads=12, mask="causal", positions="rotary", rotary_share=0.25, parallel=True,
    norm_place="pre", norm_eps=1e-5, final_norm=True,
)  # fmt: skip
_T5 = Architecture(
    layers=12, width=768, heads=12, divisor=1.0, positions="bias", activation="relu", mlp_width=3072,
    norm="rms", norm_place="pre", norm_eps=1e-6, final_norm=True, biases=(),
)  # fmt: skip
_VIT = Architecture(layers=12, width=768, heads=12, norm_place="pre", norm_eps=1e-12, final_norm=True)

PRESETS: dict[str, Architecture] = {
    "bert-tiny": _BERT.replace(layers=2, width=128, heads=2),
    "bert-mini": _BERT.replace(layers=4, width=256, heads=4),
    "bert-base": _BERT,
    "bert-large": _BERT.replace(layers=24, width=1024, heads=16),
    "albert-base": _BERT.replace(shared=True, activation="gelu_tanh"),
    "xlnet-base": _BERT.replace(positions="relative", biases=("mlp", "norm")),
    "gpt2": _GPT2,
    "llama-1b": _LLAMA,
    "pythia-160m": _NEOX,
    "t5-base": _T5,
    "vit-base": _VIT,
}


def preset(name: str) -> Architecture:
    """The architecture of that name, case and hyphens forgiven.

    >>> preset("bert-base").layers, preset("BERT base").layers
    (12, 12)
    """
    called = forgiven(name, PRESETS) if isinstance(name, str) else name
    if not isinstance(name, str) or called not in PRESETS:
        raise ArchitectureError(one_of("model", name, PRESETS), subject="model")
    return PRESETS[called]
